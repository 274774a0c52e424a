#!/bin/sh
# One offline run on this node; it starts its ranks itself, so this is the whole job file.
#
#   launchers/offline_single_node.sh parallel=tp4 data.limit=4
#
# PYTHON names the interpreter (default: python).
exec "${PYTHON:-python}" -m inferkit "$@"
