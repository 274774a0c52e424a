import pytest
import torch

from inferkit.core.errors import ConfigError
from inferkit.core.place import RankPlace
from inferkit.platforms import cpu
from inferkit.platforms.cpu import CpuPlatform, usable_cores


def test_threads_are_what_was_asked_for():
    before = torch.get_num_threads()
    try:
        CpuPlatform(num_threads=1).start(RankPlace())
        assert torch.get_num_threads() == 1
        CpuPlatform().start(RankPlace())
        assert torch.get_num_threads() == usable_cores()
    finally:
        torch.set_num_threads(before)


def test_ranks_of_a_node_share_its_cores_and_its_memory(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu, "usable_cores", lambda: 6)
    monkeypatch.setattr(cpu, "available_memory", lambda: 900)
    platform = CpuPlatform()
    try:
        platform.start(RankPlace(world_size=3, local_world_size=3))
        assert torch.get_num_threads() == 2
        assert platform.free_memory() == 300
    finally:
        torch.set_num_threads(before)


def test_hyper_threads_do_not_count(monkeypatch):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cpu.psutil, "cpu_count", lambda logical: 4)
    assert usable_cores() == 4
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: {3})
    assert usable_cores() == 1
    monkeypatch.setattr(cpu.psutil, "cpu_count", lambda logical: None)
    assert usable_cores() == 1


def test_device_memory_replaces_what_the_machine_has():
    assert CpuPlatform(device_memory=1234).free_memory() == 1234
    assert CpuPlatform().free_memory() > 2**20


def test_unknown_memory_is_an_error_that_names_the_key(monkeypatch):
    monkeypatch.setattr(cpu, "available_memory", lambda: None)
    with pytest.raises(ConfigError, match="platform.device_memory"):
        CpuPlatform().free_memory()


def test_peak_memory_is_at_least_what_was_touched():
    platform = CpuPlatform()
    before = platform.peak_memory()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert platform.peak_memory() >= max(before, block.nbytes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_without_native_products_stay_plain(monkeypatch, dtype):
    monkeypatch.setattr(cpu, "_has_packed_linear", lambda dtype: False)
    weight = torch.zeros(4, 4, dtype=dtype)
    assert CpuPlatform().pack_weight(weight) is weight
