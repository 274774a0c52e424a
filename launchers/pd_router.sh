#!/bin/sh
# The router on this node, kept alive; instances that were told of it join by themselves.
#
#   launchers/pd_router.sh 10.0.0.1,10.0.0.2 10.0.0.3 model=llama model.path=/models/my-llama
#
# Words are those of pd_node.sh; what only instances read is left out. Variables: see pd_common.sh.
set -eu

# shellcheck source=launchers/pd_common.sh
. "$(dirname "$0")/pd_common.sh"

read_lists "${1:-}" "${2:-}"
shift 2
if [ -z "$(own_address "$router_ip")" ]; then
  fail "the router belongs on $router_ip, which is no address of this node (it has:$(own_addresses | sed 's/^ */ /')); start it there, or set ROUTER_IP on every node"
fi
launch router "$@"
