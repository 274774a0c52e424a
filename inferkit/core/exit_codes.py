"""Exit codes of every command."""

EXIT_OK = 0
EXIT_FAILED = 1
"""Something ran and did not end well; of `diff`: the two sides differ."""
EXIT_REFUSED = 2
"""The command cannot be carried out as it is written; nothing was started."""
EXIT_INTERRUPTED = 130
