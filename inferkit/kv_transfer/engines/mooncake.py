"""Mooncake's transfer engine: TCP here, RDMA or Ascend by its parameters.

    protocol=tcp      any network; package mooncake-transfer-engine-non-cuda (extra `mooncake`)
    protocol=rdma     device_name names the NIC, e.g. mlx5_0
    protocol=ascend   package mooncake-transfer-engine-npu and CANN

Its TCP writes are done when the receiver has placed the bytes. Ports are chosen by the library;
the variables MC_MIN_RPC_PORT and MC_MAX_RPC_PORT bound them. It reads MC_LOG_LEVEL (here ERROR
unless set) and MC_TRANSFER_TIMEOUT.
"""

import importlib
import os
from typing import Any

import torch

from inferkit.kv_transfer.engines.library import LibraryEngine
from inferkit.kv_transfer.engines.runs import TransferEngineError

PEER_TO_PEER = "P2PHANDSHAKE"
"""Sessions find each other by their addresses, without a metadata server."""


class MooncakeEngine(LibraryEngine):
    """Args:
    protocol: tcp, rdma or ascend.
    device_name: the NIC or device to use; empty = the library's choice.
    """

    name = "mooncake"

    def __init__(self, *, protocol: str = "tcp", device_name: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.protocol = protocol
        self.device_name = device_name
        self._engine: Any = None

    def _open(self) -> None:
        self._engine = _engine_class()()
        code = self._engine.initialize(self.host, PEER_TO_PEER, self.protocol, self.device_name)
        if code:
            raise TransferEngineError(
                f"Mooncake did not start on {self.host} with protocol={self.protocol!r}, "
                f"device_name={self.device_name!r}: code {code}; its log on stderr says more with "
                "MC_LOG_LEVEL=INFO"
            )
        self.session_id = f"{self.host}:{self._engine.get_rpc_port()}"

    def _shut(self) -> None:
        for view in self.regions:
            self._engine.unregister_memory(view.data_ptr())
        self._engine = None

    def _register_memory(self, region: int, view: torch.Tensor) -> None:
        code = self._engine.register_memory(view.data_ptr(), len(view))
        if code:
            raise TransferEngineError(
                f"Mooncake did not register region {region} of {len(view)} bytes: code {code}; "
                "regions must not overlap"
            )

    def _write(
        self, session_id: str, sources: list[int], targets: list[int], lengths: list[int]
    ) -> int:
        code: int = self._engine.batch_transfer_sync_write(session_id, sources, targets, lengths)
        return code


def _engine_class() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read by the library when it is loaded
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ModuleNotFoundError as error:
        raise TransferEngineError(
            f"the mooncake engine needs the package of Mooncake ({error}); install "
            "'inferkit[mooncake]', or choose disagg/transfer=shared_memory or disagg/transfer=tcp"
        ) from None
    except ImportError as error:
        raise TransferEngineError(
            f"Mooncake cannot be loaded: {error}; it needs the system package libibverbs1 "
            "(apt-get install libibverbs1), also without an InfiniBand device"
        ) from None
