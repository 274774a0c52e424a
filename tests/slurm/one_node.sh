#!/usr/bin/env bash
# A Slurm of one node for tests, from Debian's packages: apt-get install slurmctld slurmd munge
# slurm-client. It lives in one folder and on ports of its own, beside any other Slurm.
#
#   one_node.sh start FOLDER    then: export SLURM_CONF=FOLDER/slurm.conf; sinfo
#   one_node.sh stop FOLDER
set -euo pipefail

READY_LIMIT_S=60
DAEMONS=(slurmd slurmctld munged)

die() {
  echo "one_node.sh: $*" >&2
  exit 1
}

free_ports() { # COUNT
  python3 - "$1" <<'PYTHON'
import socket
import sys

taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(one.getsockname()[1] for one in taken))
PYTHON
}

start() {
  local folder="$1" node user ports memory program
  for program in munged slurmctld slurmd sinfo sbatch; do
    command -v "$program" > /dev/null || die "$program is not installed"
  done
  mkdir -p "$folder"/{state,spool}
  chmod 755 "$folder"
  node="$(hostname -s)" user="$(id -un)"
  read -r -a ports <<< "$(free_ports 2)"
  memory="$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)"
  cat > "$folder/slurm.conf" <<CONF
ClusterName=one_node
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$memory State=UNKNOWN
PartitionName=all Nodes=$node Default=YES MaxTime=INFINITE State=UP
CONF
  head -c 128 /dev/urandom > "$folder/munge.key"
  chmod 600 "$folder/munge.key"
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
  export SLURM_CONF="$folder/slurm.conf"
  slurmctld -c -f "$SLURM_CONF"
  slurmd -c -f "$SLURM_CONF" -N "$node"
  for ((waited = 0; waited < READY_LIMIT_S; waited++)); do
    if [ "$(sinfo --noheader --format=%t 2> /dev/null)" = idle ]; then
      echo "export SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep 1
  done
  tail -n 20 "$folder"/*.log >&2
  stop "$folder"
  die "the node is not idle after $READY_LIMIT_S s"
}

stop() {
  local folder="$1" daemon pid
  if [ -e "$folder/slurm.conf" ]; then
    SLURM_CONF="$folder/slurm.conf" timeout 10 scancel --user="$(id -un)" --full || true
  fi
  for daemon in "${DAEMONS[@]}"; do
    [ -e "$folder/$daemon.pid" ] || continue
    pid="$(cat "$folder/$daemon.pid")"
    kill "$pid" 2> /dev/null || true
    for ((waited = 0; waited < 100; waited++)); do
      kill -0 "$pid" 2> /dev/null || break
      sleep 0.1
    done
    kill -9 "$pid" 2> /dev/null || true
  done
}

case "${1:-}" in
  start | stop)
    [ -n "${2:-}" ] || die "$1 needs a FOLDER"
    "$1" "$(realpath -m "$2")"
    ;;
  *) die "start FOLDER, or stop FOLDER" ;;
esac
