"""Every family at every split equals transformers, in float32 (the equality matrix)."""

import pytest

from tests.parallel.matrix import References, check


@pytest.fixture(scope="module")
def reference(tiny_hf_model):
    return References(tiny_hf_model)


@pytest.mark.parametrize("split", ["tp2", "dp2"])
def test_two_ranks(ranks, reference, split):
    check(ranks(2), "llama", reference("llama"), [f"parallel={split}"])
