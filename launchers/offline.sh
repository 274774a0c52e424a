#!/bin/sh
# A cluster's job file names a script: this is the whole of it, for one node and the offline runner.
exec python -m inferkit "$@"
