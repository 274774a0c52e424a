#!/bin/sh
# One offline run on several nodes: the same command on each of them.
#
#   launchers/offline_multi_node.sh 10.0.0.1,10.0.0.2 parallel=tp16 parallel.devices_per_node=8
#
# The first word lists the addresses of all nodes, the master first. Which of them this node is
# follows from its own addresses, or from NODE_RANK (0 = master) where that is set.
#
# MASTER_PORT is a port that is free on the master (default: 29500).
# PYTHON names the interpreter (default: python).
set -eu

fail() {
  echo "offline_multi_node.sh: $1" >&2
  exit 2
}

case "${1:-}" in
  "") fail "the list of nodes is missing: $0 IP,IP,... [KEY=VALUE ...]" ;;
  *=* | -*) fail "the first word is $1, but must be the list of nodes: $0 IP,IP,... [KEY=VALUE ...]" ;;
esac
nodes=$1
shift

# "10.0.0.1,10.0.0.2" -> one address a line, then as the positions 0, 1, ...
addresses=$(printf '%s\n' "$nodes" | tr ',' '\n')
num_nodes=$(printf '%s\n' "$addresses" | wc -l)
if printf '%s\n' "$addresses" | grep -q '^$'; then
  fail "the list of nodes $nodes has an empty place"
fi
if [ "$num_nodes" -lt 2 ]; then
  fail "the list of nodes names $nodes alone; for one node use offline_single_node.sh"
fi
twice=$(printf '%s\n' "$addresses" | sort | uniq -d | head -n 1)
if [ -n "$twice" ]; then
  fail "the list of nodes names $twice twice"
fi

if [ -n "${NODE_RANK:-}" ]; then
  case "$NODE_RANK" in
    *[!0-9]*) fail "NODE_RANK=$NODE_RANK is no number; use 0 to $((num_nodes - 1))" ;;
  esac
  if [ "$NODE_RANK" -ge "$num_nodes" ]; then
    fail "NODE_RANK=$NODE_RANK is too big for $num_nodes nodes; use 0 to $((num_nodes - 1))"
  fi
else
  own=$(hostname -I 2>/dev/null || true)
  rank=0
  for address in $addresses; do
    case " $own " in
      *" $address "*)
        if [ -n "${NODE_RANK:-}" ]; then
          fail "this node has several of the addresses $nodes; set NODE_RANK"
        fi
        NODE_RANK=$rank
        ;;
    esac
    rank=$((rank + 1))
  done
  if [ -z "${NODE_RANK:-}" ]; then
    fail "none of $nodes is an address of this node (it has: ${own:-none known}); set NODE_RANK to its place in the list, 0 to $((num_nodes - 1))"
  fi
fi
export NODE_RANK

exec "${PYTHON:-python}" -m inferkit \
  "parallel.node_ips=[$nodes]" "parallel.master_port=${MASTER_PORT:-29500}" "$@"
