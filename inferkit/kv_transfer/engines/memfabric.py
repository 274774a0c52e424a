"""MemFabric's transfer engine, for device memory of Ascend NPUs.

Every receiver serves a small store of its own, at the address that is its session id; writers find
it there when they first write. The package (extra `memfabric`) can be imported anywhere; moving
bytes needs an Ascend driver, so this engine has not run outside of signature checks.
"""

import importlib
import socket
from typing import Any

import torch

from inferkit.kv_transfer.engines.library import LibraryEngine
from inferkit.kv_transfer.engines.runs import TransferEngineError

WRITER, RECEIVER = "Prefill", "Decode"
"""The library's names of the two sides."""
OPERATIONS = ("SDMA", "HOST_RDMA", "DEVICE_RDMA", "DEVICE_URMA", "DEVICE_UBOE")


class MemFabricEngine(LibraryEngine):
    """Args:
    operation: how bytes move: SDMA within a super-node, DEVICE_RDMA across.
    port: of the session (0 = a free one). The library takes another one where it cannot have it.
    nic: NIC for HOST_RDMA, tcp://ip:port.
    """

    name = "memfabric"

    def __init__(
        self, *, operation: str = "SDMA", port: int = 0, nic: str = "", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if operation not in OPERATIONS:
            raise TransferEngineError(
                f"memfabric: operation={operation!r} must be one of {', '.join(OPERATIONS)}"
            )
        self.operation = operation
        self.port = port
        self.nic = nic
        self._library: Any = None
        self._engine: Any = None

    def _open(self) -> None:
        self._library = _library()
        self._engine = self._library.TransferEngine()
        port = self.port or _free_port(self.host)
        code = self._engine.initialize(
            f"tcp://{self.host}:{port}",
            f"{self.host}:{port}",
            RECEIVER if self.receives else WRITER,
            self.device_id,
            getattr(self._library.TransDataOpType, self.operation),
            store_server_role=RECEIVER,
            nic=self.nic,
        )
        self._check(code, f"start as {self.host}:{port}")
        self.session_id = f"{self.host}:{self._engine.get_rpc_port() or port}"

    def _shut(self) -> None:
        for view in self.regions:
            self._engine.unregister_memory(view.data_ptr())
        self._engine.destroy()
        self._engine.unInitialize()

    def _register_memory(self, region: int, view: torch.Tensor) -> None:
        code = self._engine.register_memory(view.data_ptr(), len(view))
        self._check(code, f"register region {region} of {len(view)} bytes")

    def _write(
        self, session_id: str, sources: list[int], targets: list[int], lengths: list[int]
    ) -> int:
        code: int = self._engine.batch_transfer_sync_write(session_id, sources, targets, lengths)
        return code

    def _check(self, code: int, what: str) -> None:
        if code:
            why = self._library.get_last_err_msg() or "its log on stderr says more"
            raise TransferEngineError(
                f"MemFabric could not {what} (operation={self.operation}, device "
                f"{self.device_id}): code {code}, {why}; is this an Ascend host with its driver?"
            )


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _library() -> Any:
    try:
        return importlib.import_module("memfabric_hybrid")
    except ImportError as error:
        raise TransferEngineError(
            f"the memfabric engine needs the package memfabric-hybrid ({error}); install "
            "'inferkit[memfabric]', or choose disagg/transfer=shared_memory or disagg/transfer=tcp"
        ) from None
