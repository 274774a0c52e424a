#!/bin/sh
# Whatever role this node has, kept alive: the same command on every node of a deployment.
#
#   launchers/pd_node.sh 10.0.0.1,10.0.0.2 10.0.0.3 model.path=/models/m prefill:parallel=tp16 \
#     parallel.devices_per_node=8 decode:parallel=dp8
#
# The first two words list the addresses of all prefill and of all decode nodes, instance by
# instance, each leader first. A node finds its role by its own address; the router starts on the
# first decode node, or on ROUTER_IP. Words that begin with prefill:, decode: or router: are for
# that role alone.
#
# PD_ROLE=prefill|decode says which role is meant where a node is in both lists; there, devices
# must be divided with CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES. Further variables: see
# pd_common.sh.
set -eu

# shellcheck source=launchers/pd_common.sh
. "$(dirname "$0")/pd_common.sh"

read_lists "${1:-}" "${2:-}"
shift 2

prefill_address=$(own_address "$prefill_ips")
decode_address=$(own_address "$decode_ips")
case "${PD_ROLE:-}" in
  prefill) require_own prefill "$prefill_ips" ;;
  decode) require_own decode "$decode_ips" ;;
  "")
    if [ -n "$prefill_address" ] && [ -n "$decode_address" ]; then
      fail "this node is in both lists ($prefill_address, $decode_address); set PD_ROLE=prefill or PD_ROLE=decode and start it once for each, or use pd_single_host.sh"
    fi
    ;;
  *) fail "PD_ROLE=$PD_ROLE is no role of a node; use prefill or decode" ;;
esac

roles=${PD_ROLE:-}
if [ -z "$roles" ]; then
  if [ -n "$prefill_address" ]; then
    roles=prefill
  elif [ -n "$decode_address" ]; then
    roles=decode
  fi
elif [ -n "$prefill_address" ] && [ -n "$decode_address" ]; then
  for device in /dev/davinci[0-9]* /dev/nvidia[0-9]*; do
    if [ -e "$device" ] && [ -z "${ASCEND_RT_VISIBLE_DEVICES:-}${CUDA_VISIBLE_DEVICES:-}" ]; then
      fail "this node is in both lists, so each role needs devices of its own; set ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES"
    fi
  done
fi
if [ "$roles" = decode ] && [ -n "${NODE_RANK:-}" ] && [ -z "${ROUTER_IP:-}" ]; then
  # The position decides: several decode nodes may be addresses of one machine, or none.
  if [ "$NODE_RANK" = 0 ]; then
    roles="router decode"
  fi
elif [ -n "$(own_address "$router_ip")" ] && [ "$roles" != prefill ]; then
  roles="router $roles"
elif [ -n "$(own_address "$router_ip")" ] && [ -z "$decode_address" ]; then
  roles="router $roles"
fi
if [ -z "$roles" ] && [ -n "${NODE_RANK:-}" ]; then
  fail "NODE_RANK=$NODE_RANK is a position in one of the lists, and no address of this node says in which; set PD_ROLE=prefill or PD_ROLE=decode too"
fi
if [ -z "$roles" ]; then
  fail "none of $prefill_ips,$decode_ips is an address of this node (it has:$(own_addresses | sed 's/^ */ /')); correct the lists"
fi
launch "$roles" "$@"
