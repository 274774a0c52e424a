"""Imported by the process that ranks are forked from, before anything else: makes it, and so the
ranks, a session of its own.

A signal to the process group of the command (Ctrl-C, `timeout`, `kill -- -PGID`) then reaches the
command alone, which ends its ranks in good order.
"""

import os

os.setsid()
