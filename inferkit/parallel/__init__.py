"""Communication between the ranks of one instance."""
