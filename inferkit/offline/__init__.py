"""Determined prompts, step timing, run directory: the offline mode."""
