"""Checkpoints with MXFP4 experts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.gpt_oss.mxfp4 import SIZES, save_mxfp4_pair


@pytest.fixture(scope="package")
def mxfp4_pair(
    tiny_hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """(folder with MXFP4 experts, folder of the same model dequantised)."""
    mxfp4, plain = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("plain")
    save_mxfp4_pair(tiny_hf_model("gpt_oss", **SIZES), mxfp4, plain)
    return mxfp4, plain
