"""Checkpoints with MXFP4 experts equal transformers on the dequantised ones, in float32."""

import pytest

from tests.e2e.schedules import check, reference_of, run
from tests.parallel import matrix


@pytest.fixture(scope="module")
def coded(mxfp4_pair):
    """(folder with MXFP4 experts, what transformers generates with the plain ones)."""
    mxfp4, plain = mxfp4_pair
    return mxfp4, reference_of(plain)


def test_one_rank(coded):
    folder, reference = coded
    check(*run(folder, "gpt_oss", "small_chunks"), reference, "mxfp4")


@pytest.mark.full
@pytest.mark.parametrize("split", ["tp3", "ep2", "tp4"])
def test_shares_that_begin_inside_of_groups(ranks, coded, split):
    matrix.check(ranks, split, "gpt_oss", *coded)
