"""Greedy tokens of prefill/decode deployments equal transformers, in float32."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pd.cells import MODELS, VALUES, Cell, check, covering
from tests.ranks import RankPool

COVER = covering(VALUES)
SQUARE = [
    Cell(model=model, prefill=prefill, decode=decode, block_size=block_size)
    for model in MODELS
    for prefill in ("tp1", "tp2", "tp4")
    for decode in ("tp1", "tp2", "tp4")
    for block_size in (1, 16, 128)
]
DEFAULT = [
    Cell(),
    Cell(prefill="tp2", decode="tp1", block_size=1, engine="tcp", digest=True),
    Cell(prefill="tp1", decode="tp2", model="gpt_oss", retracts=True),
    Cell(prefill="cp2", decode="tp1", model="deepseek_v3", block_size=128, chunks="whole"),
]
CELLS = [
    *(pytest.param(cell, id=str(cell)) for cell in DEFAULT),
    *(pytest.param(cell, id=str(cell), marks=pytest.mark.multiproc) for cell in COVER),
    *(
        pytest.param(cell, id=str(cell), marks=pytest.mark.full)
        for cell in SQUARE
        if cell not in COVER and cell not in DEFAULT
    ),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[str, int], Any]]:
    """`pools("prefill0", 2)` is the pool of an instance of two ranks."""
    known: dict[tuple[str, int], RankPool] = {}

    def get(name: str, world_size: int) -> RankPool:
        if (name, world_size) not in known:
            known[name, world_size] = RankPool(world_size)
        return known[name, world_size]

    yield get
    for pool in known.values():
        pool.close()


@pytest.mark.parametrize("cell", CELLS)
def test_a_deployment_generates_what_transformers_does(pools, references, cell):
    option, folder, reference = references(MODELS[cell.model])
    check(pools, cell, option, folder, reference)


def test_the_cover_has_every_pair_of_values():
    for name, values in VALUES.items():
        assert {getattr(cell, name) for cell in COVER} == set(values)
