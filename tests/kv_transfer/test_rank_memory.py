from dataclasses import replace
from typing import Any

import pytest
import torch

from inferkit.core.transfer_messages import TensorAddress
from inferkit.kv_transfer.engines.in_process import Fabric, InProcessEngine
from inferkit.kv_transfer.layout import LayoutError
from inferkit.kv_transfer.rank_memory import model_heads, register_memory
from tests.kv_transfer.manager_ranks import FULL, MIXED, NUM_BLOCKS, lay_out, specs_of


def make_engine() -> InProcessEngine:
    return InProcessEngine(fabric=Fabric(), epoch=1)


def test_every_tensor_has_an_address_in_one_region() -> None:
    engine = make_engine()
    memory = lay_out(engine, specs_of(MIXED, 2), 3)
    sizes = [NUM_BLOCKS * 4 * heads * dim * 4 for heads, dim in ((2, 6), (2, 6), (1, 16), (1, 4))]
    assert memory.addresses == (
        TensorAddress(0, 0, 0, 0),
        TensorAddress(0, 1, 0, sizes[0]),
        TensorAddress(1, 0, 0, 2 * sizes[0]),
        TensorAddress(1, 1, 0, 2 * sizes[0] + sizes[2]),
    )
    assert engine.sizes.tolist() == [sum(sizes), 3 * 64]
    assert (memory.num_cells, memory.cells_region) == (3, 1)
    memory.cell_bytes[5] = 9
    assert engine.arrays[1][5] == 9
    assert memory.num_kv_heads == {0: 3, 1: 1}
    engine.start()
    target = memory.target(engine.describe(), attn_tp_size=2)
    assert (target.slot_region, target.slot_offset) == (1, 0)
    assert target.num_blocks == {FULL: NUM_BLOCKS}


@pytest.mark.parametrize(
    "change",
    [
        lambda k: k[:-1],
        lambda k: k.transpose(0, 1).contiguous().transpose(0, 1),
        lambda k: k.clone(),
        lambda k: k.view(torch.int32).flatten(),
    ],
    ids=["blocks", "strides", "elsewhere", "shape"],
)
def test_a_tensor_that_does_not_lie_as_expected_is_refused(change: Any) -> None:
    engine, specs = make_engine(), specs_of(MIXED[:1], 1)
    buffer = engine.allocate(2 * NUM_BLOCKS * 4 * 3 * 6 * 4)
    k, v = (part.view(torch.float32).view(NUM_BLOCKS, 4, 3, 6) for part in buffer.chunk(2))
    kwargs: Any = {
        "specs": specs,
        "buffer": buffer,
        "num_blocks": {FULL: NUM_BLOCKS},
        "num_cells": 1,
    }
    register_memory(engine, caches=[(k, v)], **kwargs)
    with pytest.raises(ValueError, match="cache tensor 0 of layer 0 has shape"):
        register_memory(engine, caches=[(change(k), v)], **kwargs)


def test_a_model_must_say_how_many_heads_it_has() -> None:
    specs = specs_of(MIXED, 1)
    assert model_heads(specs) == [3, 1]
    with pytest.raises(LayoutError, match="layer 1 .* give its Attention num_model_kv_heads"):
        model_heads([specs[0], replace(specs[1], num_model_heads=None)])
