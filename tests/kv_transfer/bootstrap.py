"""A bootstrap server on loopback, and what ranks say to it."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from inferkit.core.transfer_messages import InstanceLayout, LayerLayout, Register
from inferkit.online.bootstrap_server import make_bootstrap_app
from inferkit.online.bootstrap_table import BootstrapTable

LIMIT_S = 20.0


def layer(idx: int = 0, **changed: Any) -> LayerLayout:
    values: dict[str, Any] = {
        "layer_idx": idx,
        "kind": "full_attention",
        "manager_key": "full_attention",
        "num_kv_heads": 2,
        "dims": (8, 8),
        "dtype": "float32",
        "block_size": 4,
        "layout": "BnBsND",
    }
    return LayerLayout(**(values | changed))


def layout(tp: int = 1, dp: int = 1, **changed: Any) -> InstanceLayout:
    values: dict[str, Any] = {
        "model": "m",
        "model_fingerprint": "f",
        "transfer_engine": "tcp/1",
        "attn_tp_size": tp,
        "attn_dp_size": dp,
        "layers": (layer(),),
    }
    return InstanceLayout(**(values | changed))


def registration(rank: int = 0, *, epoch: int = 1, **changed: Any) -> Register:
    values: dict[str, Any] = {
        "instance_id": "p",
        "epoch": epoch,
        "peer_epoch": epoch,
        "rank": rank,
        "rank_ip": "127.0.0.1",
        "rank_port": 7000 + rank,
        "layout": layout(),
        "max_prefill_tokens": 64,
    }
    return Register(**(values | changed))


def table(*, epoch: int = 1, interval_s: float = 5.0, **changed: Any) -> BootstrapTable:
    values: dict[str, Any] = {
        "instance_id": "p",
        "epoch": epoch,
        "register_interval_s": interval_s,
        "clock": time.monotonic,
    }
    return BootstrapTable(**(values | changed))


def full_table(num_ranks: int = 1, *, epoch: int = 1, **changed: Any) -> BootstrapTable:
    """Every rank has registered, and stays for a long time."""
    found = table(epoch=epoch, interval_s=1000.0, **changed)
    instance = layout(tp=num_ranks)
    for rank in range(num_ranks):
        found.register(
            registration(rank, epoch=epoch, layout=instance, instance_id=found.peer.instance_id)
        )
    return found


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[socket.socket]:
    """A socket that accepts connections, and answers nothing by itself."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        yield listener


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def serving_app(app: Any, port: int = 0) -> Iterator[str]:
    """Its url; the server lives in a thread until the end of the block."""
    with listening(port) as listener:
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        )
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
        )
        thread.start()
        until(lambda: server.started)
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@contextlib.contextmanager
def serving(
    known: BootstrapTable, port: int = 0, *, secret: bytes = b"", tries_addresses: bool = False
) -> Iterator[str]:
    app = make_bootstrap_app(known, secret=secret, tries_addresses=tries_addresses)
    with serving_app(app, port) as url:
        yield url


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> float:
    """Seconds until something has happened in another thread."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + limit_s, "it does not happen"
        time.sleep(0.001)
    return time.monotonic() - started
