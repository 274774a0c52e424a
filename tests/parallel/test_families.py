"""Registered families (tests/families.py) at every split equal transformers, in float32."""

import pytest

from tests.families import FAMILIES, VARIANTS
from tests.parallel.matrix import References, check
from tests.parallel.splits import SPLITS

CELLS = [
    pytest.param(variant, split, marks=[] if (variant, split) in family.cover else pytest.mark.full)
    for family in FAMILIES.values()
    for variant in family.variants
    for split in SPLITS
]


@pytest.fixture(scope="module")
def reference(tiny_hf_model):
    return References(tiny_hf_model)


@pytest.mark.parametrize("variant,split", CELLS)
def test_a_family_equals_transformers(ranks, reference, variant, split):
    option, config = VARIANTS[variant]
    world_size, overrides = SPLITS[split]
    check(ranks(world_size), option, reference(option, **config), overrides)


@pytest.mark.parametrize("option", FAMILIES)
def test_the_cover_names_cells_that_exist(option):
    family = FAMILIES[option]
    assert family.cover, "no split runs by default"
    assert {variant for variant, _ in family.cover} <= set(family.variants)
    assert {split for _, split in family.cover} <= set(SPLITS)
