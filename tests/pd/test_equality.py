"""Greedy tokens of prefill/decode deployments equal transformers, in float32."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.pd.cells import COVER, DEFAULT, MODELS, SQUARE, VALUES, check
from tests.ranks import RankPool

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
