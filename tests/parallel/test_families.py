"""Registered families (tests/families.py) at every split equal transformers, in float32."""

from collections import Counter

import pytest

from tests.families import FAMILIES
from tests.parallel.matrix import check
from tests.parallel.splits import LOCK_STEP, LOCK_STEP_OF_EXPERTS, SPLITS

CELLS = [
    pytest.param(variant, split, marks=[] if (variant, split) in family.cover else pytest.mark.full)
    for family in FAMILIES.values()
    for variant in family.variants
    for split in SPLITS
]
TENSOR, DATA_OR_EXPERT = {"tp2", "tp3", "tp4"}, {"dp2", "ep2", "ep4", "dp2tp2"}
CONTEXT = {"cp2", "cp4"}
MAX_DEFAULT_CELLS = 5
"""Of a family; each takes a second or two."""


@pytest.mark.parametrize("variant,split", CELLS)
def test_a_family_equals_transformers(ranks, references, variant, split):
    option, folder, reference = references(variant)
    for output in check(ranks, split, option, folder, reference):
        lock_step = LOCK_STEP_OF_EXPERTS if output["has_experts"] else LOCK_STEP
        assert output["is_lock_step"] == (split in lock_step)


@pytest.mark.parametrize("option", FAMILIES)
def test_the_cover_of_a_family_is_small_and_has_every_kind_of_split(option):
    family = FAMILIES[option]
    variants, splits = (set(names) for names in zip(*family.cover, strict=True))
    assert variants <= set(family.variants) and splits <= set(SPLITS)
    assert len(family.cover) <= MAX_DEFAULT_CELLS, "leave further cells to `full`"
    for kind in (TENSOR, DATA_OR_EXPERT, CONTEXT):
        assert splits & kind, f"add one of {sorted(kind)}"


def test_the_covers_together_have_every_split_twice():
    count = Counter(split for family in FAMILIES.values() for _, split in family.cover)
    assert [split for split in SPLITS if count[split] < 2] == []
