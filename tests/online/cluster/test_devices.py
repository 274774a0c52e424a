import pytest

from inferkit.core.errors import ConfigError
from inferkit.online.cluster.devices import shared_out

CUDA = "inferkit.platforms.cuda.CudaPlatform"
NPU = "inferkit.platforms.npu.NpuPlatform"


def test_instances_on_a_cpu_share_it():
    assert shared_out("inferkit.platforms.cpu.CpuPlatform", [2, 1], variables={}) == [{}, {}]


def test_every_instance_sees_devices_of_its_own(tmp_path):
    for name in ("davinci0", "davinci1", "davinci2", "davinci3", "davinci_manager"):
        (tmp_path / name).touch()
    assert shared_out(NPU, [2, 1, 1], variables={}, devices=tmp_path) == [
        {"ASCEND_RT_VISIBLE_DEVICES": "0,1"},
        {"ASCEND_RT_VISIBLE_DEVICES": "2"},
        {"ASCEND_RT_VISIBLE_DEVICES": "3"},
    ]


def test_devices_that_are_hidden_from_the_cluster_stay_hidden(tmp_path):
    variables = {"CUDA_VISIBLE_DEVICES": "4, 6,7"}
    assert shared_out(CUDA, [1, 2], variables=variables, devices=tmp_path) == [
        {"CUDA_VISIBLE_DEVICES": "4"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]


def test_too_few_devices_are_told_with_both_numbers(tmp_path):
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(ConfigError, match=r"have 3 ranks, but there are 1 devices \(CUDA_VIS"):
        shared_out(CUDA, [2, 1], variables={}, devices=tmp_path)
