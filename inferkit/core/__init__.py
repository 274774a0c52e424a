"""Vocabulary of inferkit: plain data and protocols, importable without torch."""
