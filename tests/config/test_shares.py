from dataclasses import dataclass

import pytest

from inferkit.config.shares import RankShare
from inferkit.core.parallel_layout import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class Arch:
    """The least that a family says of itself."""

    num_parameters: int = 1001

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 900


@dataclass(frozen=True, kw_only=True)
class ArchWithHeads(Arch):
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    num_experts: int | None = None


class ArchOfRanks(ArchWithHeads):
    """Knows what a rank holds."""

    def num_parameters_of_rank(self, layout: ParallelLayout) -> int:
        return 100 * layout.dense_tp_size

    def kv_bytes_per_token_of_rank(self, dtype: str, layout: ParallelLayout) -> int:
        return {"float32": 40, "bfloat16": 20}[dtype] * layout.attn_tp_size


TP2 = ParallelLayout(world_size=4, attn_tp_size=2, dense_tp_size=4)


def share(arch: Arch, layout: ParallelLayout = TP2, dtype: str = "bfloat16") -> RankShare:
    return RankShare(arch=arch, layout=layout, dtype=dtype)


def test_a_family_knows_its_own_shares() -> None:
    assert share(ArchOfRanks()).weight_bytes == 2 * 400
    assert share(ArchOfRanks(), dtype="float32").weight_bytes == 4 * 400
    assert share(ArchOfRanks()).kv_bytes_per_token == 40


def test_weights_are_estimated_by_the_attention() -> None:
    assert share(Arch()).num_parameters == 501
    assert share(Arch(), ParallelLayout()).num_parameters == 1001


def test_experts_lie_on_all_ranks() -> None:
    assert share(ArchWithHeads(num_experts=8)).num_parameters == 251


@pytest.mark.parametrize(("tp_size", "num_bytes"), [(1, 900), (2, 600), (3, 300), (4, 300)])
def test_kv_cache_is_estimated_by_the_heads(tp_size: int, num_bytes: int) -> None:
    layout = ParallelLayout(world_size=tp_size, attn_tp_size=tp_size)

    assert share(ArchWithHeads(), layout).kv_bytes_per_token == num_bytes


def test_without_heads_a_rank_may_hold_the_whole_cache() -> None:
    assert share(Arch()).kv_bytes_per_token == 900
    assert share(Arch()).heads is None


def test_heads_of_a_rank() -> None:
    heads = share(ArchWithHeads()).heads

    assert heads is not None
    assert (heads.padded_heads, heads.num_local_heads) == (12, 6)
    assert (heads.padded_kv_heads, heads.num_local_kv_heads) == (4, 2)


def test_experts_of_a_rank() -> None:
    layout = ParallelLayout(world_size=8, moe_tp_size=2)

    assert share(ArchWithHeads(num_experts=64), layout).num_local_experts == 16
    assert share(ArchWithHeads(num_experts=None), layout).num_experts == 0
    assert share(Arch(), layout).num_experts == 0
