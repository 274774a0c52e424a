import pytest

from inferkit.core.parallel_layout import ParallelLayout, Ranks, contiguous, strided
from inferkit.inspect.groups import partition_text, ranks_text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((0, 1, 2, 3), "{0-3}"),
        ((4, 5), "{4-5}"),
        ((0, 4), "{0,4}"),
        ((0, 4, 8, 12), "{0-12 step 4}"),
        ((0, 1, 3), "{0,1,3}"),
        ((7,), "{7}"),
    ],
)
def test_ranks_text(ranks: Ranks, text: str) -> None:
    assert ranks_text(ranks) == text


def test_few_groups_are_all_shown() -> None:
    assert partition_text(contiguous(8, 4)) == "{0-3} {4-7}"
    assert partition_text(strided(8, 4)) == "{0-6 step 2} {1-7 step 2}"


def test_many_groups_are_shortened() -> None:
    assert partition_text(contiguous(128, 8)) == "16 groups of 8: {0-7} {8-15} ... {120-127}"


def test_leaders_are_shown_without_the_ranks_that_follow_them() -> None:
    groups = ParallelLayout(world_size=16, attn_tp_size=4).all_partitions

    assert partition_text(groups["dp_leader_group"]) == "{0-12 step 4}"
    assert partition_text(groups["tp_cpu_group"]) == "{0-3} {4-7} {8-11} {12-15}"
    assert partition_text(groups["cp_group"]) == "every rank alone"
