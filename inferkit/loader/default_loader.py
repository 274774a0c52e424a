"""Loads the weights of a model source, tensor by tensor."""

import logging
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

from inferkit.core.errors import ModelLoadError
from inferkit.loader.base_loader import (
    BaseModelLoader,
    Progress,
    WeightAssigner,
    check_tensors,
    no_progress,
)

if TYPE_CHECKING:
    from inferkit.loader.source import ModelSource

logger = logging.getLogger(__name__)


class DefaultModelLoader(BaseModelLoader):
    """Reads safetensors or GGUF; memory beyond the model is that of one tensor."""

    @torch.no_grad()
    def load(
        self, model: nn.Module, source: "ModelSource | None", *, progress: Progress = no_progress
    ) -> None:
        if source is None:
            raise ModelLoadError(
                "model.path=null has no weights; set model.path, or model.with_ckpt=false for "
                "random ones"
            )
        checkpoint = source.checkpoint
        names = check_tensors(model, checkpoint)
        total = sum(checkpoint.num_bytes(name) for name in names)
        assigner = WeightAssigner(model)
        start_s = time.perf_counter()
        done = 0
        progress(0, total)
        for name in names:
            assigner.assign(name, checkpoint.read(name))
            done += checkpoint.num_bytes(name)
            progress(done, total)
        assigner.check_complete()
        seconds = time.perf_counter() - start_s
        logger.info("weights loaded tensors=%d bytes=%d s=%.2f", len(names), done, seconds)
