import pytest
import torch

from inferkit.kv_transfer.digest import Side, link_digest, link_heads
from inferkit.kv_transfer.engines.in_process import Fabric, InProcessEngine
from inferkit.kv_transfer.rank_memory import RankMemory
from tests.kv_transfer.manager_ranks import (
    BLOCK_SIZE,
    FULL,
    MIXED,
    WINDOW,
    Layer,
    content,
    lay_out,
    specs_of,
)

KV_LEN = 10
WANTED = {FULL: (5, 6, 7)}
HERE = {FULL: (2, 9, 4)}


def memory_of(model: tuple[Layer, ...] = (Layer(),), tp_size: int = 1) -> RankMemory:
    engine = InProcessEngine(fabric=Fabric(), epoch=1)
    return lay_out(engine, specs_of(model, tp_size), 1)


def fill(memory: RankMemory, blocks: dict[str, tuple[int, ...]], first_head: int = 0) -> None:
    """The KV of one request from some head on; -1 everywhere else."""
    for spec in memory.specs:
        for tensor_idx, cache in enumerate(memory.caches[spec.layer_idx]):
            cache.fill_(-1)
            shape = (KV_LEN, 4, spec.dims[tensor_idx])
            whole = content(1, spec.layer_idx, tensor_idx, shape)
            for token in range(KV_LEN):
                block = blocks[spec.manager_key][token // BLOCK_SIZE]
                heads = whole[token, first_head : first_head + spec.num_heads]
                if block:
                    cache[block, token % BLOCK_SIZE] = heads


def digest(
    memory: RankMemory,
    side: Side,
    prefill_tp: tuple[int, int] = (1, 0),
    decode_tp: tuple[int, int] = (1, 0),
    here: dict[str, tuple[int, ...]] = HERE,
    wanted: dict[str, tuple[int, ...]] = WANTED,
) -> str:
    heads = link_heads(memory.num_kv_heads, prefill_tp=prefill_tp, decode_tp=decode_tp)
    return link_digest(memory, side=side, heads=heads, block_ids=here, wanted=wanted, kv_len=KV_LEN)


def test_both_sides_agree_wherever_the_blocks_lie() -> None:
    prefill, decode = memory_of(), memory_of()
    fill(prefill, HERE)
    fill(decode, WANTED)
    ours = digest(prefill, Side.PREFILL)
    assert len(ours) == 32
    assert digest(decode, Side.DECODE, here=WANTED) == ours
    # Blocks that decode has for tokens to come play no role.
    longer = {FULL: (*WANTED[FULL], 8)}
    assert digest(decode, Side.DECODE, here=longer, wanted=longer) == ours


def test_what_nobody_reads_plays_no_role() -> None:
    decode = memory_of()
    fill(decode, WANTED)
    before = digest(decode, Side.DECODE, here=WANTED)
    for cache in decode.caches[0]:
        cache[WANTED[FULL][-1], KV_LEN % BLOCK_SIZE :] = 5.0
        cache[0] = 5.0
    assert digest(decode, Side.DECODE, here=WANTED) == before


@pytest.mark.parametrize("tensor_idx", [0, 1])
@pytest.mark.parametrize("token", [0, 7, 9])
def test_every_byte_plays_a_role(tensor_idx: int, token: int) -> None:
    decode = memory_of()
    fill(decode, WANTED)
    before = digest(decode, Side.DECODE, here=WANTED)
    cache = decode.caches[0][tensor_idx]
    raw = cache.view(torch.uint8)
    raw[WANTED[FULL][token // BLOCK_SIZE], token % BLOCK_SIZE, 3, -1] ^= 1
    assert digest(decode, Side.DECODE, here=WANTED) != before


def test_each_link_of_unequal_ranks_has_its_own() -> None:
    """Two prefill ranks with two heads each feed a decode rank with four."""
    prefills, decode = [memory_of(tp_size=2) for _ in range(2)], memory_of()
    for rank, memory in enumerate(prefills):
        fill(memory, HERE, first_head=2 * rank)
    fill(decode, WANTED)
    ours = [digest(memory, Side.PREFILL, (2, rank)) for rank, memory in enumerate(prefills)]
    assert ours[0] != ours[1]
    assert [digest(decode, Side.DECODE, (2, rank), here=WANTED) for rank in (0, 1)] == ours


def test_blocks_before_a_window_play_no_role() -> None:
    prefill, decode = memory_of((Layer(window=5),)), memory_of((Layer(window=5),))
    here, wanted = {WINDOW: (0, 9, 4)}, {WINDOW: (0, 6, 7)}
    fill(prefill, here)
    fill(decode, wanted)
    ours = digest(prefill, Side.PREFILL, here=here, wanted=wanted)
    assert digest(decode, Side.DECODE, here=wanted, wanted=wanted) == ours
    longer = {WINDOW: (3, 9, 4)}  # prefill still has a block that decode does not want
    assert digest(prefill, Side.PREFILL, here=longer, wanted=wanted) == ours


def test_a_link_may_move_nothing() -> None:
    """Three heads on four ranks: the last one has padding only."""
    memory = memory_of(MIXED[:1], tp_size=4)
    heads = link_heads(memory.num_kv_heads, prefill_tp=(4, 3), decode_tp=(4, 3))
    assert heads == {0: []}
    assert digest(memory, Side.PREFILL, (4, 3), (4, 3)) == digest(
        memory, Side.DECODE, (4, 3), (4, 3)
    )
