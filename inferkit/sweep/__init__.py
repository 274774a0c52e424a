"""Sweeps: the result of every cell, and the table of all of them."""
