"""Processes that torchrun or srun has started: which rank each is, and where its ranks meet.

Such a process is a rank itself. Torch-free.
"""

import contextlib
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from inferkit.core.errors import ConfigError
from inferkit.core.place import LOOPBACK, RankPlace
from inferkit.runtime.place import local_addresses

logger = logging.getLogger(__name__)

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set by torchrun itself; the variables above are also set by scripts that do not stay."""
PARENT = os.getppid()
"""Read when the process begins: the parent may be gone later."""
LAUNCHER_POLL_INTERVAL_S = 0.5
REFUSAL_GRACE_S = 10
"""A launcher ends all ranks when one ends: so long do others wait for rank 0 to say why."""
FIRST_SRUN_PORT, NUM_SRUN_PORTS = 15000, 10000
"""Jobs that share a node get ports of their own, by their job number."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What the launcher told this process."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    """Host of rank 0."""
    master_port: int
    """Where the ranks meet first; the launcher itself may listen there."""
    is_served: bool = False
    """The launcher listens there; else rank 0 does."""
    attempt: str = "0"
    """Differs where a launcher starts the ranks again."""

    def place(self) -> RankPlace:
        """Where this rank is among all, and where they meet.

        Raises:
            ConfigError: the address by which other nodes reach this one is not clear.
        """
        is_one_node = self.local_world_size == self.world_size
        return RankPlace(
            rank=self.rank,
            local_rank=self.local_rank,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            master_addr=self.master_addr,
            master_port=self.master_port,
            is_served=self.is_served,
            local_ip=LOOPBACK if is_one_node else _local_ip(self.master_addr),
        )


def find_launched(
    variables: Mapping[str, str] = os.environ, *, srun_port: int = 0
) -> Launched | None:
    """The place of this process by the variables of torchrun or srun; None = started by hand.

    One task of srun is no run of several ranks, and neither is the script of a batch job, which
    has the job's variables but is no task of a step.

    Args:
        srun_port: where ranks that srun starts meet (0 = MASTER_PORT, else by the job's number).

    Raises:
        ConfigError: a variable has a value that no launcher sets.
    """
    if all(variables.get(name) for name in TORCHRUN_VARIABLES):
        world_size = _number(variables, "WORLD_SIZE")
        return Launched(
            launcher="torchrun",
            rank=_number(variables, "RANK"),
            local_rank=_number(variables, "LOCAL_RANK"),
            world_size=world_size,
            local_world_size=_number(variables, "LOCAL_WORLD_SIZE", world_size),
            master_addr=variables["MASTER_ADDR"],
            master_port=_number(variables, "MASTER_PORT"),
            is_served=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=variables.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    is_task = all(variables.get(name) for name in SRUN_VARIABLES)
    is_batch_script = "SLURM_JOB_CPUS_PER_NODE" in variables and "SLURM_STEP_ID" not in variables
    if not is_task or is_batch_script:
        return None
    num_tasks = _number(variables, "SLURM_STEP_NUM_TASKS", _number(variables, "SLURM_NTASKS"))
    if num_tasks == 1:
        return None
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or LOOPBACK
    by_job = FIRST_SRUN_PORT + _number(variables, "SLURM_JOB_ID", 0) % NUM_SRUN_PORTS
    return Launched(
        launcher="srun",
        rank=_number(variables, "SLURM_PROCID"),
        local_rank=_number(variables, "SLURM_LOCALID"),
        world_size=num_tasks,
        local_world_size=_tasks_here(variables, num_tasks),
        master_addr=variables.get("MASTER_ADDR") or first_host(nodes),
        master_port=srun_port or _number(variables, "MASTER_PORT", by_job),
    )


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name) or ("" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(f"the environment variable {name}={text} is no number")
    return int(text)


def first_host(node_list: str) -> str:
    """The first of Slurm's list of hosts: `node[03-05,9],gpu1` -> `node03`."""
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", node_list)
    if found is None:
        raise ConfigError(f"SLURM_JOB_NODELIST={node_list} names no host")
    return "".join(part or "" for part in found.groups())


def _tasks_here(variables: Mapping[str, str], num_tasks: int) -> int:
    """Slurm writes the tasks of each node as `2(x3),1`."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE")
    if not text:
        return num_tasks
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ConfigError(f"the tasks of the nodes, {text}, cannot be read")
        counts += [int(found[1])] * int(found[2] or 1)
    node = _number(variables, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else counts[-1]


def check_launched(launched: Launched, world_size: int) -> None:
    """Refuse a launcher that has started another number of ranks than the configuration has.

    Raises:
        ConfigError: names both numbers.
    """
    if launched.world_size == world_size:
        return
    option = "--nproc-per-node" if launched.launcher == "torchrun" else "--ntasks"
    started = launched.world_size
    has_option = started & (started - 1) == 0
    example = f", for example parallel=tp{started}" if has_option else ""
    raise ConfigError(
        f"{launched.launcher} has started {started} processes, but parallel.world_size="
        f"{world_size}; configure {started} ranks{example}, or start {world_size} "
        f"({launched.launcher} {option} {world_size}), or start `python -m inferkit ...` once, "
        f"without {launched.launcher}: it starts its own ranks"
    )


@contextlib.contextmanager
def ending_with_launcher(
    place: RankPlace, variables: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """End this process when torchrun, which has started it, is no more: it ends its ranks itself
    unless it is killed, and nobody else would."""
    if STARTED_BY_TORCHRUN not in variables:
        yield
        return
    has_finished = threading.Event()

    def watch() -> None:
        while not has_finished.wait(LAUNCHER_POLL_INTERVAL_S):
            if os.getppid() != PARENT:
                text = "torchrun was killed, and its ranks end with it"
                logger.error(text)
                if place.local_rank != 0:
                    # Else the one that speaks would only see that this one has ended.
                    has_finished.wait(2 * LAUNCHER_POLL_INTERVAL_S)
                with contextlib.suppress(OSError, ValueError):
                    if place.local_rank == 0:
                        os.write(sys.stderr.fileno(), f"inferkit: {text}\n".encode())
                os._exit(1)

    thread = threading.Thread(target=watch, name="launcher watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_finished.set()
        thread.join()


def _local_ip(master_addr: str) -> str:
    """Address by which the other nodes reach this one.

    Raises:
        ConfigError: it is not clear.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: the system only chooses the address that it would send from.
        with contextlib.suppress(OSError):
            probe.connect((master_addr, 1))
        address: str = probe.getsockname()[0]
    own = sorted(ip for ip in local_addresses() if not ip.startswith("127."))
    if address in own:
        return address
    # A host that knows its own name as a loopback address.
    if len(own) == 1:
        return own[0]
    raise ConfigError(
        f"which address of this node ({', '.join(own)}) reaches {master_addr} is not "
        "clear; set MASTER_ADDR to an address of rank 0's node, not to its name"
    )
