#!/bin/sh
# Router, prefill and decode instances on this host, each with devices of its own.
#
#   launchers/pd_single_host.sh cluster.prefill=2 cluster.decode=1 parallel=tp2
#
# PYTHON names the interpreter (default: python). DRY_RUN=1 shows the command.
exec ${DRY_RUN:+echo} "${PYTHON:-python}" -m inferkit +role=cluster "$@"
