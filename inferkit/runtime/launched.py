"""Processes that torchrun or srun has started: which rank each is, and where its ranks meet.

Such a process is a rank itself. Torch-free until the ranks meet.
"""

import contextlib
import datetime
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferkit.core.errors import ConfigError, WorkerError
from inferkit.core.place import LOOPBACK, RankPlace
from inferkit.runtime.peer_watch import PeerWatch
from inferkit.runtime.place import ANY_ADDRESS, local_addresses, reserved_port

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
FIRST_SRUN_PORT, NUM_SRUN_PORTS = 15000, 10000
"""Jobs that share a node get ports of their own, by their job number."""
MEETING_TIMEOUT_S = 600
"""A launcher starts all ranks together, but images and file systems may be slow."""
READ_GRACE_S = 30.0


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

    @property
    def is_one_node(self) -> bool:
        return self.local_world_size == self.world_size


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


@dataclass(kw_only=True)
class Meeting:
    """What ranks know after they have met."""

    place: RankPlace
    run_dir: Path
    has_finished: bool = False
    """To be set when this rank has done its part: until then its end is a failure to the others."""


@contextlib.contextmanager
def meeting(launched: Launched, make_run_dir: Callable[[], Path]) -> Iterator[Meeting]:
    """Meet the other ranks; rank 0 makes the run directory. Call on the main thread.

    While the context is open, the end of another rank raises PeerLostError here.

    Raises:
        WorkerError: rank 0 does not answer, or has failed to make the directory.
    """
    store = _open_store(launched)
    key = f"inferkit/{launched.attempt}/meeting"
    local_ip = _local_ip(launched)
    host = ANY_ADDRESS if local_ip else LOOPBACK
    master_addr = launched.master_addr if local_ip else LOOPBACK
    watch = PeerWatch(rank=launched.rank, world_size=launched.world_size)
    found: dict[str, Any]
    with contextlib.ExitStack() as stack:
        if launched.rank == 0:
            try:
                port = stack.enter_context(reserved_port(0, host=host))
                server = stack.enter_context(socket.create_server((host, 0)))
                run_dir = make_run_dir().absolute()
            except OSError as error:
                store.set(key, json.dumps({"error": str(error)}))
                _wait_for_readers(store, key, launched.world_size - 1)
                raise
            found = {"run_dir": str(run_dir), "port": port, "watch": server.getsockname()[1]}
            store.set(key, json.dumps(found))
            watch.accept(server, timeout_s=MEETING_TIMEOUT_S)
        else:
            found = _answer(store, key, launched)
            watch.connect(master_addr, found["watch"])
        place = RankPlace(
            rank=launched.rank,
            local_rank=launched.local_rank,
            world_size=launched.world_size,
            local_world_size=launched.local_world_size,
            master_addr=master_addr,
            master_port=found["port"],
            local_ip=local_ip or LOOPBACK,
        )
        met = Meeting(place=place, run_dir=Path(found["run_dir"]))
        watch.start()
        try:
            yield met
        finally:
            watch.close(has_finished=met.has_finished)


def _open_store(launched: Launched) -> Any:
    # Its warnings are pages of C++ frames, for what is told in a sentence below.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch.distributed as dist

    host, port = launched.master_addr, launched.master_port
    is_server = launched.rank == 0 and not launched.is_served
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            launched.world_size,
            is_server,
            timeout=datetime.timedelta(seconds=MEETING_TIMEOUT_S),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if is_server:
            problem = (
                f"cannot listen on port {port}, where the ranks meet; set MASTER_PORT to a free one"
            )
        else:
            problem = f"nothing answers at {host}:{port}, where rank 0 should be; has it failed?"
        detail = str(error).splitlines()[0]
        raise WorkerError(f"rank {launched.rank}: {problem} ({detail})") from error


def _answer(store: Any, key: str, launched: Launched) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(store.get(key))
    except RuntimeError as error:
        detail = str(error).splitlines()[0]
        raise WorkerError(
            f"rank {launched.rank}: rank 0 named no run directory; has it failed? ({detail})"
        ) from error
    if "error" in found:
        store.add(f"{key}/read", 1)
        raise WorkerError(f"rank 0 cannot make the run directory: {found['error']}")
    return found


def _wait_for_readers(store: Any, key: str, num_readers: int) -> None:
    """Stay until all have read why this rank ends: its store ends with it."""
    end_s = time.monotonic() + READ_GRACE_S
    while store.add(f"{key}/read", 0) < num_readers and time.monotonic() < end_s:
        time.sleep(0.1)


def _local_ip(launched: Launched) -> str:
    """Address by which the other nodes reach this one; empty = there is no other node."""
    if launched.is_one_node:
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: the system only chooses the address that it would send from.
        with contextlib.suppress(OSError):
            probe.connect((launched.master_addr, launched.master_port))
        address: str = probe.getsockname()[0]
    own = sorted(ip for ip in local_addresses() if not ip.startswith("127."))
    if address in own:
        return address
    # A host that knows its own name as a loopback address.
    if len(own) == 1:
        return own[0]
    raise ConfigError(
        f"which address of this node ({', '.join(own)}) reaches {launched.master_addr} is not "
        "clear; set MASTER_ADDR to an address of rank 0's node, not to its name"
    )
