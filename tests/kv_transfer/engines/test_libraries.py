"""Calls into Mooncake and MemFabric, bound against the signatures of the installed packages.

What needs their hardware has not run: Mooncake over RDMA and Ascend, MemFabric's data path.
"""

import importlib
import inspect
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inferkit.core.protocols import FenceState, WriteState
from inferkit.kv_transfer.engines import memfabric, mooncake
from inferkit.kv_transfer.engines.library import MAX_CALL_RUNS, LibraryEngine
from inferkit.kv_transfer.engines.memfabric import MemFabricEngine
from inferkit.kv_transfer.engines.mooncake import MooncakeEngine
from inferkit.kv_transfer.engines.runs import TransferEngineError
from tests.ranks import free_port


def signature_of(function: Any) -> inspect.Signature:
    """Of a method that pybind11 made, read from the first line of its docstring."""
    line = next(text for text in function.__doc__.splitlines() if "(" in text)
    inner = re.sub(r"<[^>]*>", "0", line[line.index("(") + 1 : line.rindex(") ->")])
    parameters, depth, start = [], 0, 0
    for index, char in enumerate(inner + ","):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            parameters.append(inner[start:index].strip())
            start = index + 1
    return inspect.Signature(
        [
            inspect.Parameter(
                text.split(":")[0].strip(),
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=0 if "=" in text else inspect.Parameter.empty,
            )
            for text in parameters
        ]
    )


class BoundLibrary:
    """Stands for an engine of the library: checks every call against the real class."""

    def __init__(self, real: Any, answers: dict[str, Any]) -> None:
        self._real = real
        self._answers = answers
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        signature = signature_of(getattr(self._real, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs).arguments
            self.calls.append((name, {k: v for k, v in bound.items() if k != "self"}))
            return self._answers.get(name, 0)

        return call


def drive(engine: LibraryEngine, library: BoundLibrary) -> list[str]:
    """A whole life of an engine; returns the names of the calls."""
    source = torch.zeros(1000, dtype=torch.uint8)
    engine.register(source)
    engine.start()
    late = torch.zeros(64, dtype=torch.float32)
    engine.register(late)
    description = engine.describe()
    peer = engine.connect(description)
    write = engine.write_batch(peer, 1, [(0, 10, 1, 20, 30, 2, 100, 50)])
    many = engine.write_batch(peer, 1, [(0, 0, 0, 0, 1)] * (MAX_CALL_RUNS + 1))
    while WriteState.RUNNING in (engine.poll(write), engine.poll(many)):
        time.sleep(0.001)
    assert engine.poll(write) is engine.poll(many) is WriteState.DONE
    assert engine.fence(1) is FenceState.UNABLE
    engine.close()
    calls = [args for name, args in library.calls if name == "batch_transfer_sync_write"]
    session, own, theirs, lengths = list(calls[0].values())[:4]
    assert session == description["address"][0]
    assert own == [source.data_ptr() + 10, source.data_ptr() + 110]
    assert theirs == [late.data_ptr() + 20, late.data_ptr() + 70]
    assert lengths == [30, 30]
    assert [len(list(call.values())[1]) for call in calls[1:]] == [MAX_CALL_RUNS, 1]
    return [name for name, _ in library.calls]


@pytest.mark.mooncake
@pytest.mark.parametrize(
    ("protocol", "device_name"), [("tcp", ""), ("rdma", "mlx5_0"), ("ascend", "npu_0")]
)
def test_every_call_fits_mooncake(
    monkeypatch: pytest.MonkeyPatch, protocol: str, device_name: str
) -> None:
    real = importlib.import_module("mooncake.engine").TransferEngine
    library = BoundLibrary(real, {"get_rpc_port": 12345})
    monkeypatch.setattr(mooncake, "_engine_class", lambda: lambda: library)
    engine = MooncakeEngine(epoch=1, num_threads=1, protocol=protocol, device_name=device_name)
    names = drive(engine, library)
    assert library.calls[0] == (
        "initialize",
        {"arg0": "127.0.0.1", "arg1": "P2PHANDSHAKE", "arg2": protocol, "arg3": device_name},
    )
    assert set(names) == {
        "initialize",
        "get_rpc_port",
        "register_memory",
        "unregister_memory",
        "batch_transfer_sync_write",
    }


@pytest.mark.mooncake
@pytest.mark.parametrize("receives", [True, False])
@pytest.mark.parametrize("operation", memfabric.OPERATIONS)
def test_every_call_fits_memfabric(
    monkeypatch: pytest.MonkeyPatch, operation: str, receives: bool
) -> None:
    real = importlib.import_module("memfabric_hybrid")
    library = BoundLibrary(real.TransferEngine, {"get_rpc_port": 12345})

    class Module:
        TransferEngine = staticmethod(lambda: library)
        TransDataOpType = real.TransDataOpType
        get_last_err_msg = staticmethod(real.get_last_err_msg)

    monkeypatch.setattr(memfabric, "_library", lambda: Module)
    engine = MemFabricEngine(
        epoch=1, num_threads=1, operation=operation, device_id=3, port=777, receives=receives
    )
    if receives:
        drive(engine, library)
    else:
        engine.start()
        engine.close()
    (name, args), *_ = library.calls
    assert name == "initialize"
    assert args["store_url"] == "tcp://127.0.0.1:777"
    assert args["session_id"] == "127.0.0.1:777"
    assert args["role"] == ("Decode" if receives else "Prefill")
    assert args["device_id"] == 3
    assert args["data_op_type"] == getattr(real.TransDataOpType, operation)
    assert args["store_server_role"] == "Decode"
    names = [name for name, _ in library.calls]
    assert names[-2:] == ["destroy", "unInitialize"]


@pytest.mark.mooncake
def test_the_store_of_memfabric_starts_and_stops(tmp_path: Path) -> None:
    """In a process of its own: it cannot be stopped otherwise."""
    port = free_port()
    code = (
        "import sys, memfabric_hybrid as mf\n"
        f"code = mf.create_config_store('tcp://127.0.0.1:{port}')\n"
        "print('code', code, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any(line == "code 0\n" for line in iter(process.stdout.readline, ""))
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
        process.communicate(timeout=60)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


@pytest.mark.mooncake
def test_memfabric_without_an_ascend_driver_is_one_message(tmp_path: Path) -> None:
    code = (
        "from inferkit.kv_transfer.engines.memfabric import MemFabricEngine\n"
        "engine = MemFabricEngine(epoch=1)\n"
        "try:\n"
        "    engine.start()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
        "engine.close()\n"
    )
    root = Path(__file__).resolve().parents[3]
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "TransferEngineError MemFabric could not start" in result.stdout
    assert "Ascend host" in result.stdout


@pytest.mark.parametrize(
    ("module", "engine", "message"),
    [
        ("mooncake", MooncakeEngine, r"needs the package of Mooncake.*inferkit\[mooncake\]"),
        ("memfabric_hybrid", MemFabricEngine, r"memfabric-hybrid.*inferkit\[memfabric\]"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, engine: Any, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, f"{module}.engine", None)
    with pytest.raises(TransferEngineError, match=message):
        engine(epoch=1).start()


def test_a_missing_system_package_of_mooncake_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(
        "raise ImportError('libibverbs.so.1: cannot open shared object file')", "utf-8"
    )
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TransferEngineError, match="apt-get install libibverbs1"):
        MooncakeEngine(epoch=1).start()
    for name in ("mooncake", "mooncake.engine"):
        sys.modules.pop(name, None)


def test_memfabric_checks_its_operation() -> None:
    with pytest.raises(TransferEngineError, match="operation='PIGEON' must be one of SDMA"):
        MemFabricEngine(epoch=1, operation="PIGEON")
