"""The verb `diff`: two configurations side by side, and what follows from the difference."""
