#!/bin/sh
# The prefill role on this node, kept alive; the same command on every prefill node.
#
#   launchers/pd_prefill.sh 10.0.0.1,10.0.0.2 10.0.0.3 parallel=tp16 parallel.devices_per_node=8
#
# The first two words list the addresses of all prefill and of all decode nodes, instance by
# instance, each leader first. Variables: see pd_common.sh.
set -eu

# shellcheck source=launchers/pd_common.sh
. "$(dirname "$0")/pd_common.sh"

read_lists "${1:-}" "${2:-}"
shift 2
require_own prefill "$prefill_ips"
launch prefill "$@"
