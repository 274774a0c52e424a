from pathlib import Path

import pytest

from inferkit.core import host
from inferkit.core.host import available_memory


def fake_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, used: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "CGROUP", tmp_path)


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("max", 0, 4000 * 1024),
        ("3000000", 1_000_000, 2_001_000),
        ("99999999999", 1_000_000, 4000 * 1024),
        ("1000", 500_000, 0),
    ],
)
def test_available_memory_is_what_machine_and_cgroup_leave(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, used: int, expected: int
) -> None:
    fake_files(monkeypatch, tmp_path, limit, used)

    assert available_memory() == expected


def test_available_memory_without_these_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "absent")

    assert available_memory() is None
