"""Where ranks that no common parent has started find each other, and stay in touch.

They meet at a store of rank 0 (or of the launcher), through which rank 0 tells where the ranks
join for their collectives and which run directory they share. Torch-free until they meet.
"""

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inferkit.core.errors import ConfigError, WorkerError
from inferkit.core.listening import reserved
from inferkit.core.place import LOOPBACK, RankPlace
from inferkit.runtime.peer_watch import OnStuck, PeerWatch
from inferkit.runtime.place import ANY_ADDRESS
from inferkit.runtime.rank_errors import is_peer_loss

TIMEOUT_S = 1800
"""Nodes may be started by hand, one after the other."""
READ_GRACE_S = 30.0
MAX_SHOWN = 6
"""Differences of configurations in one message."""


@dataclass(kw_only=True)
class Meeting:
    """What a rank knows after it has met the others."""

    place: RankPlace
    """With the port where the ranks join."""
    run_dir: Path | None
    has_finished: bool = False
    """To be set when this rank has done its part: until then its end is a failure to the others."""


@contextlib.contextmanager
def meeting(
    place: RankPlace,
    *,
    on_stuck: OnStuck,
    make_run_dir: Callable[[], Path] | None = None,
    facts: Mapping[str, str] | None = None,
    is_served: bool = False,
    attempt: str = "0",
) -> Iterator[Meeting]:
    """Meet the other ranks at the master of `place`. Call on the main thread.

    While the context is open, the end of another rank raises PeerLostError here.

    Args:
        on_stuck: see `PeerWatch`.
        make_run_dir: called on rank 0 (None = the ranks share no run directory).
        facts: what must be equal on all ranks, key -> value.
        is_served: something else than rank 0 listens at the master's port.
        attempt: differs where the same store is met at again.

    Raises:
        ConfigError: a rank has other facts than rank 0; every rank is told which.
        WorkerError: a rank does not come, or rank 0 has failed to make the directory.
    """
    store = _open_store(place, is_served=is_served)
    key = f"inferkit/{attempt}/meeting"
    is_one_node = place.local_world_size == place.world_size
    watch = PeerWatch(rank=place.rank, world_size=place.world_size, on_stuck=on_stuck)
    with contextlib.ExitStack() as stack:
        if place.rank == 0:
            host = LOOPBACK if is_one_node else ANY_ADDRESS
            try:
                port = stack.enter_context(reserved(host, 0))
                server = stack.enter_context(
                    socket.create_server((host, 0), backlog=place.world_size)
                )
                run_dir = str(make_run_dir().absolute()) if make_run_dir else ""
            except OSError as error:
                store.set(key, json.dumps({"error": str(error)}))
                _wait_for_readers(store, key, place.world_size - 1)
                raise
            found = {"run_dir": run_dir, "port": port, "watch": server.getsockname()[1]}
            store.set(key, json.dumps(found | {"facts": dict(facts or {})}))
            watch.accept(server, timeout_s=TIMEOUT_S, check=lambda: _check_refusal(store, key))
        else:
            found = _answer(store, key, place)
            _compare(store, key, place, dict(facts or {}), found["facts"])
            watch.connect(LOOPBACK if is_one_node else place.master_addr, found["watch"])
        met = Meeting(
            place=replace(place, master_port=found["port"], is_served=False),
            run_dir=Path(found["run_dir"]) if found["run_dir"] else None,
        )
        if is_one_node:
            met.place = replace(met.place, master_addr=LOOPBACK)
        watch.start()
        try:
            yield met
        except Exception as error:
            if is_peer_loss(error):
                watch.name_loss()
            raise
        finally:
            watch.close(has_finished=met.has_finished)


def _open_store(place: RankPlace, *, is_served: bool) -> Any:
    # Its warnings are pages of C++ frames, for what is told in a sentence below.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch.distributed as dist

    host, port = place.master_addr, place.master_port
    is_server = place.rank == 0 and not is_served
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            place.world_size,
            is_server,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if is_server:
            problem = (
                f"cannot listen on port {port}, where the ranks meet; set parallel.master_port "
                "(under a launcher MASTER_PORT) to a free one"
            )
        else:
            problem = f"nothing answers at {host}:{port}, where rank 0 should be; has it failed?"
        detail = str(error).splitlines()[0]
        raise WorkerError(f"rank {place.rank}: {problem} ({detail})") from error


def _answer(store: Any, key: str, place: RankPlace) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(store.get(key))
    except RuntimeError as error:
        detail = str(error).splitlines()[0]
        raise WorkerError(
            f"rank {place.rank}: rank 0 has not told where to join; has it failed? ({detail})"
        ) from error
    if "error" in found:
        store.add(f"{key}/read", 1)
        raise WorkerError(f"rank 0 cannot make the run directory: {found['error']}")
    return found


def _compare(
    store: Any, key: str, place: RankPlace, own: dict[str, str], of_rank_0: dict[str, str]
) -> None:
    """Refuse to join ranks that were started with another configuration, and let rank 0 know."""
    names = [name for name in of_rank_0 | own if own.get(name) != of_rank_0.get(name)]
    if not names:
        return
    shown = ", ".join(
        f"{name}={own.get(name)} (rank 0: {of_rank_0.get(name)})" for name in names[:MAX_SHOWN]
    )
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    text = (
        f"rank {place.rank} was started with another configuration than rank 0: {shown}{more}; "
        "start all ranks with the same options"
    )
    store.set(f"{key}/refusal", text)
    raise ConfigError(text)


def _check_refusal(store: Any, key: str) -> None:
    """On rank 0: raise what another rank has refused to join for."""
    if store.check([f"{key}/refusal"]):
        raise ConfigError(store.get(f"{key}/refusal").decode())


def _wait_for_readers(store: Any, key: str, num_readers: int) -> None:
    """Stay until all have read why this rank ends: its store ends with it."""
    end_s = time.monotonic() + READ_GRACE_S
    while store.add(f"{key}/read", 0) < num_readers and time.monotonic() < end_s:
        time.sleep(0.1)
