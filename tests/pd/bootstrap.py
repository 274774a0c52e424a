"""The bootstrap server of one instance, on a free port of loopback."""

import asyncio
import socket
import threading
import time
from types import TracebackType

import uvicorn

from inferkit.kv_transfer.identity import Peer
from inferkit.online.bootstrap_server import make_bootstrap_app
from inferkit.online.bootstrap_table import BootstrapTable


class BootstrapThread:
    """Serves from `__enter__` to `__exit__`."""

    def __init__(self, peer: Peer) -> None:
        table = BootstrapTable(
            instance_id=peer.instance_id,
            epoch=peer.epoch,
            register_interval_s=5.0,
            clock=time.monotonic,
        )
        self.listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            make_bootstrap_app(table), log_level="warning", lifespan="off", access_log=False
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.listener]))

    def __enter__(self) -> "BootstrapThread":
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()
