"""What every loader does: give each checkpoint tensor to its parameter, and miss none.

The contract of a model class: `expected_tensors()` names the checkpoint tensors with their
shapes, `ignored_tensors(name)` says which others carry nothing, `packed_modules_mapping` says
which of them share a parameter, and a parameter may carry `weight_loader(parameter, tensor,
shard_id)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from inferkit.core.errors import ModelLoadError
from inferkit.loader.checkpoint import Checkpoint, some_of

if TYPE_CHECKING:
    from inferkit.loader.source import ModelSource

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """For callers that show nothing."""


class BaseModelLoader(ABC):
    """Fills the parameters of a model that was constructed with empty ones."""

    @abstractmethod
    def load(
        self, model: nn.Module, source: "ModelSource | None", *, progress: Progress = no_progress
    ) -> None:
        """Fill every parameter of `model`, on the device and in the type that it has.

        Raises:
            ModelLoadError: tensors are missing, surplus, of another shape or cannot be read.
        """


class WeightAssigner:
    """Copies checkpoint tensors into the parameters of a model, by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model_name = type(model).__name__
        self.packed: dict[str, tuple[str, str]] = dict(
            getattr(model, "packed_modules_mapping", None) or {}
        )
        self.parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._waiting: dict[str, set[str | None]] = {name: set() for name in self.parameters}
        self._shards_of: dict[str, set[str]] = {}
        for parameter_name, shard_id in self.packed.values():
            self._shards_of.setdefault(parameter_name, set()).add(shard_id)

    def assign(self, name: str, tensor: torch.Tensor) -> None:
        """Copy `tensor`, with a cast to the parameter's type, to where `name` belongs."""
        target, shard_id = self._target(name)
        parameter = self.parameters.get(target)
        if parameter is None:
            raise ModelLoadError(
                f"{self.model_name}.expected_tensors names {name}, but it has no parameter {target}"
            )
        weight_loader = getattr(parameter, "weight_loader", None)
        if weight_loader is not None:
            weight_loader(parameter, tensor, shard_id)
        elif shard_id is not None or parameter.shape != tensor.shape:
            raise ModelLoadError(
                f"tensor {name} has shape {tuple(tensor.shape)}, parameter {target} of "
                f"{self.model_name} has {tuple(parameter.shape)} and no weight_loader"
            )
        else:
            parameter.data.copy_(tensor)
        self._waiting[target].add(shard_id)

    def check_complete(self) -> None:
        """Every parameter, and every shard of a packed one, was assigned."""
        empty = [
            name
            for name, assigned in self._waiting.items()
            if not assigned or (None not in assigned and assigned != self._shards(name))
        ]
        if empty:
            raise ModelLoadError(
                f"{self.model_name}.expected_tensors names no tensor for the parameters "
                f"{some_of(empty)}; they would be uninitialised"
            )

    def _shards(self, parameter_name: str) -> set[str]:
        for part in parameter_name.split("."):
            if part in self._shards_of:
                return self._shards_of[part]
        return set()

    def _target(self, name: str) -> tuple[str, str | None]:
        """(parameter name, shard) of a checkpoint name."""
        parts = name.split(".")
        for idx, part in enumerate(parts):
            if part in self.packed:
                parts[idx], shard_id = self.packed[part]
                return ".".join(parts), shard_id
        return name, None


def check_tensors(model: Any, checkpoint: Checkpoint) -> list[str]:
    """The names to read, in the order of the checkpoint; nothing is read yet.

    Raises:
        ModelLoadError: names all tensors that are missing, surplus or of another shape.
    """
    expected: dict[str, tuple[int, ...]] = model.expected_tensors()
    names = [name for name in checkpoint.names() if not model.ignored_tensors(name)]
    found = set(names)
    missing = [name for name in expected if name not in found]
    surplus = [name for name in names if name not in expected]
    mis_shaped = [
        f"{name} {checkpoint.shape(name)}, expected {tuple(expected[name])}"
        for name in names
        if name in expected and checkpoint.shape(name) != tuple(expected[name])
    ]
    faults = [
        f"{len(tensors)} {kind}: {some_of(tensors)}"
        for kind, tensors in (
            ("missing", missing),
            ("not known to the model", surplus),
            ("of another shape", mis_shaped),
        )
        if tensors
    ]
    if faults:
        raise ModelLoadError(
            f"the checkpoint does not fit {type(model).__name__}: tensors {'; '.join(faults)}; "
            "choose the model= option of this architecture and check config.json against the "
            "weights"
        )
    return names
