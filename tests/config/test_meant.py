"""Words of other programs, derived values, sizes with a unit."""

import pytest

from inferkit.config.meant import as_bytes, derived_formula, is_pipeline, renamed


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("tensor_parallel_size", "4", "parallel=tp4"),
        ("parallel.tp", "8", "parallel=tp8"),
        ("data_parallel_size", "2", "parallel=dp2"),
        ("ep_size", "", "parallel=epN"),
        ("max_num_seqs", "64", "scheduler.batch_size=64"),
        ("gpu_memory_utilization", "", "kv_cache.mem_fraction=VALUE"),
        ("pipeline_parallel_size", "2", None),
        ("batch_size", "3", None),
    ],
)
def test_words_of_other_programs(key: str, value: str, meant: str | None) -> None:
    assert renamed(key, value) == meant


def test_there_is_no_pipeline() -> None:
    assert is_pipeline("parallel.pp_size") and is_pipeline("pipeline_parallel_size")
    assert not is_pipeline("parallel.tp_size")


def test_derived_values_have_a_formula() -> None:
    assert derived_formula("parallel.moe_ep_size") == "parallel.world_size / parallel.moe_tp_size"
    assert derived_formula("parallel.moe_tp_size") is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GB", 64 * 10**9),
        ("64G", 64 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512 mib", 2**29),
        ("64", None),
        ("64XB", None),
        ("GB", None),
    ],
)
def test_sizes_with_a_unit(text: str, size: int | None) -> None:
    assert as_bytes(text) == size
