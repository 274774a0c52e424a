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
from inferkit.loader.checkpoint import CheckpointTensor

if TYPE_CHECKING:
    from inferkit.loader.source import ModelSource

logger = logging.getLogger(__name__)


class DefaultModelLoader(BaseModelLoader):
    """Reads safetensors or GGUF, and of each tensor the part that this process needs.

    Memory beyond the model is that of one part.
    """

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
        add_optional_modules = getattr(model, "add_optional_modules", None)
        if add_optional_modules is not None:
            add_optional_modules(checkpoint.names())
        names = check_tensors(model, checkpoint)
        total = sum(checkpoint.num_bytes(name) for name in names)
        assigner = WeightAssigner(model)
        start_s = time.perf_counter()
        done, first_byte = 0, checkpoint.num_bytes_read
        progress(0, total)
        for name in names:
            assigner.assign(name, CheckpointTensor(checkpoint, name))
            done += checkpoint.num_bytes(name)
            progress(done, total)
        assigner.check_complete()
        seconds = time.perf_counter() - start_s
        num_read = checkpoint.num_bytes_read - first_byte
        logger.info(
            "weights loaded tensors=%d bytes=%d read=%d s=%.2f", len(names), done, num_read, seconds
        )
