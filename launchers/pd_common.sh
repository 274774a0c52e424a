#!/bin/sh
# What the pd_*.sh launchers share; it starts nothing by itself.
#
# PYTHON names the interpreter (default: python). ROUTER_IP and ROUTER_PORT say where the router is
# (default: the first decode node, 8000). MASTER_PORT is where the nodes of one instance meet.
# INFERKIT_SECRET holds the secret of control messages, the same on every node. LOG_DIR gets the
# output (default: outputs/pd). DRY_RUN=1 shows the commands instead of starting them.

launcher=$(basename "$0")
python=${PYTHON:-python}

fail() {
  echo "$launcher: $1" >&2
  exit 2
}

# read_lists PREFILL_IPS DECODE_IPS: sets prefill_ips, decode_ips, router_ip, router_port.
read_lists() {
  usage="$0 PREFILL_IP,... DECODE_IP,... [KEY=VALUE ...]"
  if [ -z "${1:-}" ] || [ -z "${2:-}" ]; then
    fail "the lists of prefill and decode nodes are missing: $usage"
  fi
  check_list "prefill" "$1"
  check_list "decode" "$2"
  prefill_ips=$1
  decode_ips=$2
  router_ip=${ROUTER_IP:-${decode_ips%%,*}}
  router_port=${ROUTER_PORT:-8000}
}

check_list() {
  case "$2" in
    *=* | -*) fail "the list of $1 nodes is $2, which is no list of addresses: $usage" ;;
  esac
  addresses=$(printf '%s\n' "$2" | tr ',' '\n')
  if printf '%s\n' "$addresses" | grep -q '^$'; then
    fail "the list of $1 nodes $2 has an empty place"
  fi
  twice=$(printf '%s\n' "$addresses" | sort | uniq -d | head -n 1)
  if [ -n "$twice" ]; then
    fail "the list of $1 nodes names $twice twice"
  fi
}

# Addresses of this node, loopback last.
own_addresses() {
  printf '%s\n' "$(hostname -I 2>/dev/null || true) 127.0.0.1"
}

# address_of NAME: the address of a host by its name; an address is its own.
address_of() {
  case "$1" in
    *[!0-9.]*) getent ahostsv4 "$1" 2>/dev/null | awk 'NR == 1 { print $1 }' ;;
    *) printf '%s\n' "$1" ;;
  esac
}

# own_address LIST: the first of its hosts that is this node, or nothing.
own_address() {
  own=$(own_addresses)
  for address in $(printf '%s\n' "$1" | tr ',' ' '); do
    case " $own " in
      *" $(address_of "$address") "*)
        printf '%s\n' "$address"
        return
        ;;
    esac
  done
}

# require_own ROLE LIST: this node must be in it, by its addresses or by NODE_RANK.
require_own() {
  if [ -z "${NODE_RANK:-}" ] && [ -z "$(own_address "$2")" ]; then
    fail "none of the $1 nodes $2 is an address of this node (it has:$(own_addresses | sed 's/^ */ /')); correct the list, or set NODE_RANK to this node's position in it"
  fi
}

check_python() {
  if ! command -v "$python" >/dev/null 2>&1; then
    fail "there is no interpreter $python; set PYTHON"
  fi
  if ! "$python" -c 'import inferkit' 2>/dev/null; then
    fail "$python cannot import inferkit; install it there, start in a checkout, or set PYTHON"
  fi
}

# check_port KEY DEFAULT WORD...: the port that the words give to KEY is free on this node.
check_port() {
  key=$1
  port=$2
  shift 2
  for word in "$@"; do
    case "$word" in
      "$key="*) port=${word#"$key="} ;;
    esac
  done
  if ! "$python" -c 'import socket, sys
with socket.socket() as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("", int(sys.argv[1])))
    s.listen()' "$port" 2>/dev/null; then
    fail "port $port is in use on this node, or no port; is this role running already? Else choose another with $key=..."
  fi
}

check_ports() {
  role=$1
  shift
  case "$role" in
    prefill)
      check_port disagg.http_port 8001 "$@"
      check_port disagg.bootstrap_port 18800 "$@"
      check_port disagg.zmq_port 5555 "$@"
      ;;
    decode)
      check_port disagg.http_port 8100 "$@"
      check_port disagg.zmq_port 5557 "$@"
      ;;
    router) check_port router.port "$router_port" "$@" ;;
  esac
}

# is_for ROLE WORD: instances read no router.* and the router, which runs no model, little else.
is_for() {
  case "$2" in
    prefill:* | decode:* | router:*)
      [ "${2%%:*}" = "$1" ]
      return
      ;;
  esac
  case "$1/${2#+}" in
    router/disagg.secret_env=*) return 0 ;;
    router/disagg.* | router/disagg/* | router/parallel* | router/platform*) return 1 ;;
    router/kv_cache* | router/scheduler* | router/exe_mode*) return 1 ;;
    router/*) return 0 ;;
    */router.*) return 1 ;;
  esac
}

# launch ROLES WORD...: replaces this shell by what keeps these roles alive.
launch() {
  roles=$1
  shift
  count=$#
  for word in "$@"; do
    case "${word#router:}" in
      router.host=* | router.port=*)
        fail "$word would hide the router from its instances; set ROUTER_IP and ROUTER_PORT on every node"
        ;;
    esac
  done
  for role in $roles; do
    set -- "$@" ++ "$role" "$python" -m inferkit "+role=$role"
    case "$role" in
      router)
        set -- "$@" "router.host=$router_ip" "router.port=$router_port" \
          "router.prefill_urls=[]" "router.decode_urls=[]"
        if [ -n "${INFERKIT_SECRET:-}" ]; then
          set -- "$@" disagg.secret_env=INFERKIT_SECRET
        fi
        ;;
      *)
        set -- "$@" "disagg.prefill_ips=[$prefill_ips]" "disagg.decode_ips=[$decode_ips]" \
          "disagg.router_url=http://$router_ip:$router_port"
        if [ -n "${INFERKIT_SECRET:-}" ]; then
          set -- "$@" disagg.secret_env=INFERKIT_SECRET
        fi
        if [ -n "${MASTER_PORT:-}" ]; then
          set -- "$@" "parallel.master_port=$MASTER_PORT"
        fi
        ;;
    esac
    index=0
    for word in "$@"; do
      index=$((index + 1))
      [ "$index" -le "$count" ] || break
      if is_for "$role" "$word"; then
        case "$word" in
          prefill:* | decode:* | router:*) word=${word#*:} ;;
        esac
        set -- "$@" "$word"
      fi
    done
  done
  shift "$count"
  check_python
  if [ -n "${DRY_RUN:-}" ]; then
    exec "$python" -m inferkit.online.cluster.keep --dry-run "${LOG_DIR:-outputs/pd}" "$@"
  fi
  for role in $roles; do
    check_ports "$role" "$@"
  done
  exec "$python" -m inferkit.online.cluster.keep "${LOG_DIR:-outputs/pd}" "$@"
}
