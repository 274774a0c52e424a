"""What every loader does: give each checkpoint tensor to its parameter, and miss none.

The contract of a model class: `expected_tensors()` names the checkpoint tensors with their
shapes, `ignored_tensors(name)` says which others carry nothing, `packed_modules_mapping` says
which of them share a parameter, `tied_tensors` names a further parameter that a checkpoint tensor
fills too, and a parameter may carry `weight_loader(parameter, stored, shard_id)`. A module below
the model that has `load_tensor(name, stored)` takes all tensors below it. Both get a tensor that
was not read yet, and read the part that they need.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from inferkit.core.errors import ModelLoadError
from inferkit.layers.weights import StoredTensor
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
    """Copies checkpoint tensors, or parts of them, into the parameters of a model, by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model_name = type(model).__name__
        self.packed: dict[str, tuple[str, str]] = dict(
            getattr(model, "packed_modules_mapping", None) or {}
        )
        self.tied: Mapping[str, str] = getattr(model, "tied_tensors", None) or {}
        self.owners: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if name and hasattr(module, "load_tensor")
        }
        """Modules that take the tensors below them, by name."""
        self.parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._waiting: dict[str, set[str | None]] = {name: set() for name in self.parameters}
        self._owned: dict[str, list[str]] = {name: [] for name in self.owners}
        for parameter_name in self.parameters:
            owner = self._owner(parameter_name)
            if owner is not None:
                self._owned[owner].append(parameter_name)
        self._shards_of: dict[str, set[str]] = {}
        for parameter_name, shard_id in self.packed.values():
            self._shards_of.setdefault(parameter_name, set()).add(shard_id)

    def assign(self, name: str, stored: StoredTensor) -> None:
        """Copy `stored`, with a cast to the parameter's type, to where `name` belongs.

        What is read of it is up to the parameter, or to the module that takes its tensors.
        """
        owner = self._owner(name)
        if owner is None:
            target, shard_id = self._target(name)
            self._fill(target, shard_id, name, stored)
        else:
            self.owners[owner].load_tensor(name.removeprefix(f"{owner}."), stored)
            for parameter_name in self._owned[owner]:
                self._waiting[parameter_name].add(None)
        further = self.tied.get(name)
        if further in self.parameters:
            self._fill(further, None, name, stored)

    def _fill(self, target: str, shard_id: str | None, name: str, stored: StoredTensor) -> None:
        parameter = self.parameters.get(target)
        if parameter is None:
            raise ModelLoadError(
                f"{self.model_name}.expected_tensors names {name}, but it has no parameter {target}"
            )
        weight_loader = getattr(parameter, "weight_loader", None)
        if weight_loader is not None:
            weight_loader(parameter, stored, shard_id)
        elif shard_id is not None or tuple(parameter.shape) != tuple(stored.shape):
            raise ModelLoadError(
                f"tensor {name} has shape {tuple(stored.shape)}, parameter {target} of "
                f"{self.model_name} has {tuple(parameter.shape)} and no weight_loader"
            )
        else:
            parameter.data.copy_(stored.read())
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

    def _owner(self, name: str) -> str | None:
        """The nearest module above `name` that takes its tensors itself."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.owners:
                return name
        return None

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
