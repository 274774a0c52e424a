"""All checks of one configuration, in order: overrides, structure, rules, components, model."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from omegaconf import DictConfig, OmegaConf

from inferkit.config.check_cluster import ClusterPlan, RoleOutcome, plan_cluster
from inferkit.config.cluster_roles import CLUSTER
from inferkit.config.components import check_components
from inferkit.config.faults import Fault, Findings, key_of
from inferkit.config.load_rules import check_load_lengths
from inferkit.config.memory import check_memory
from inferkit.config.model_files import ModelFiles, read_model_files
from inferkit.config.model_rules import check_model
from inferkit.config.network_rules import check_library
from inferkit.config.no_effect import Use, no_effect_of_model
from inferkit.config.overrides import compose_checked
from inferkit.config.resolve import resolve_automatic, resolve_platform
from inferkit.config.rules import check_rules
from inferkit.config.schema import InferenceConfig
from inferkit.config.secrets import IS_TYPED_SECRET, keep_secrets, secret_faults
from inferkit.config.space import ConfigSpace
from inferkit.config.targets import SourceIndex
from inferkit.config.walk import set_neutral, structure_faults

SIZE_NODES = ("role", "model", "parallel", "platform", "engine", "scheduler", "kv_cache", "data")
"""Nodes whose keys decide what a rank holds."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The outcome of a check."""

    faults: tuple[Fault, ...]
    warnings: tuple[Fault, ...] = ()
    config: InferenceConfig | None = None
    """The typed configuration with automatic values resolved; None where there are faults."""
    composed: InferenceConfig | None = None
    """The same before automatic values were resolved, with harmless values where its structure has
    faults."""
    sized: InferenceConfig | None = None
    """As `config`, also where only faults are left that change no size; None = sizes are not
    right."""
    memory: int = 0
    """Bytes of a rank that its KV cache was planned with; 0 = memory was not looked at."""
    files: ModelFiles = field(default_factory=ModelFiles)
    roles: "Mapping[str, Checked]" = field(default_factory=dict)
    """Of a cluster: role -> the check of what it starts in it."""


class Checker:
    """Checks configurations of one space. Sources and model files are read once, so make a new
    one for every command.

    Args:
        is_run: what passes can run here. Else only the configuration is looked at: a shape needs
            no weights, and `platform.device_memory` may be that of another machine.
        asks_host: whether the memory of this machine counts. Else the answer is the same on all.
    """

    def __init__(self, space: ConfigSpace, *, is_run: bool = True, asks_host: bool = True) -> None:
        self.space = space
        self.is_run = is_run
        self.asks_host = asks_host
        self._index = SourceIndex()
        self._files: dict[str, ModelFiles] = {}

    def check_overrides(self, overrides: Sequence[str]) -> Checked:
        """Compose and check; every fault of all overrides is found."""
        composition = compose_checked(self.space, overrides)
        given = [key_of(text) for text in overrides]
        checked = self.check_composed(composition.cfg, composition.faults, given)
        if composition.cfg.role != CLUSTER:
            return checked
        assert checked.composed is not None, "what was checked is kept"
        return self._with_roles(overrides, checked, checked.composed)

    def check_composed(
        self, cfg: DictConfig, known: Sequence[Fault] = (), given: Collection[str] = ()
    ) -> Checked:
        """Check a composed configuration, of which `known` faults were found before.

        Args:
            given: keys of the command line.
        """
        found = _structure_faults(cfg)
        typed = self._typed(cfg, found)
        found = [fault for fault in found if fault.key not in _keys(known)]
        return self.check_config(typed, [*known, *found], given)

    def check_config(
        self, cfg: InferenceConfig, known: Sequence[Fault] = (), given: Collection[str] = ()
    ) -> Checked:
        """Check a typed configuration, of which `known` faults were found before.

        Args:
            given: keys of the command line.
        """
        faults = list(known)
        findings = check_rules(cfg)
        check_library(cfg, findings, is_run=self.is_run)
        add_new(faults, findings.faults)
        of_components = list(check_components(cfg, self._index))
        _tell_of_both(faults, of_components)
        add_new(faults, of_components)
        files = self._model_files(cfg)
        add_new(faults, files.faults)
        context_len = int(files.arch.max_context_len) if files.arch is not None else 0
        sized, memory = _sized(cfg, files, faults), 0
        if not faults:
            # Sizes mean something only where all else is right.
            resolved = resolve_automatic(cfg, context_len=context_len)
            sizes = Findings(warnings=findings.warnings)
            sizes.warnings += files.warnings
            check_load_lengths(resolved, sizes)
            if files.arch is not None:
                check_model(resolved, files.arch, sizes)
                use = Use(cfg=cfg, resolved=resolved, arch=files.arch)
                no_effect_of_model(use, sizes, given)
                add_new(faults, sizes.faults)
                sizes.faults = []
                memory = check_memory(
                    resolved,
                    files.arch,
                    sizes,
                    is_run=self.is_run,
                    asks_host=self.asks_host,
                )
            add_new(faults, sizes.faults)
        return Checked(
            faults=tuple(faults),
            warnings=tuple(findings.warnings),
            config=None if faults else resolve_automatic(cfg, context_len=context_len),
            composed=cfg,
            sized=sized,
            memory=memory,
            files=files,
        )

    def plan(
        self, overrides: Sequence[str], cfg: InferenceConfig, known: Sequence[Fault] = ()
    ) -> ClusterPlan:
        """What a cluster of this command line starts, checked."""
        return self._plan(overrides, cfg, known)[0]

    def _plan(
        self, overrides: Sequence[str], cfg: InferenceConfig, known: Sequence[Fault]
    ) -> tuple[ClusterPlan, dict[str, Checked]]:
        """A plan, and the outcome of each role's check."""
        outcomes: dict[tuple[str, ...], Checked] = {}

        def check(words: Sequence[str]) -> RoleOutcome:
            key = tuple(words)
            if key not in outcomes:  # the router's stay while those of instances get their share
                composition = compose_checked(self.space, words)
                given = [key_of(text) for text in words]
                outcomes[key] = self.check_composed(composition.cfg, composition.faults, given)
            found = outcomes[key]
            assert found.composed is not None, "what was checked is kept"
            platform = resolve_platform(found.composed.platform)
            return found.faults, found.warnings, replace(found.composed, platform=platform)

        plan = plan_cluster(overrides, cfg, check, known=known, is_run=self.is_run)
        return plan, {role: outcomes[tuple(words)] for role, words in plan.words.items()}

    def _with_roles(
        self, overrides: Sequence[str], checked: Checked, cfg: InferenceConfig
    ) -> Checked:
        """The check of a cluster with what was found in its roles."""
        plan, roles = self._plan(overrides, cfg, checked.faults)
        faults = (*checked.faults, *plan.faults)
        told = _keys(checked.warnings)
        return replace(
            checked,
            faults=faults,
            warnings=(*checked.warnings, *(w for w in plan.warnings if w.key not in told)),
            config=None if faults else checked.config,
            roles=roles,
        )

    @staticmethod
    def _typed(cfg: DictConfig, found: Sequence[Fault]) -> InferenceConfig:
        """The typed configuration, with harmless values where its structure has `found` faults."""
        if found:
            cfg = cfg.copy()
            set_neutral(cfg, _keys(found))
        typed = OmegaConf.to_object(cfg)
        assert isinstance(typed, InferenceConfig), "the root of a configuration is typed"
        keep_secrets(cfg, typed)
        return typed

    def _model_files(self, cfg: InferenceConfig) -> ModelFiles:
        model = cfg.model
        key = json.dumps(
            [model._target_, model.path, model.arch, model.with_ckpt], default=str, sort_keys=True
        )
        if key not in self._files:
            targets = self.space.model_targets
            self._files[key] = read_model_files(cfg, targets, is_run=self.is_run)
        return self._files[key]


def _sized(
    cfg: InferenceConfig, files: ModelFiles, faults: Sequence[Fault]
) -> InferenceConfig | None:
    """The configuration with automatic values resolved; None where `faults`, or the model's
    shape, make sizes wrong."""
    if any(_concerns_sizes(fault.key) for fault in faults):
        return None
    if files.arch is None:
        return resolve_automatic(cfg)
    resolved = resolve_automatic(cfg, context_len=int(files.arch.max_context_len))
    of_model = Findings()
    check_model(resolved, files.arch, of_model)
    return None if of_model.faults else resolved


def _concerns_sizes(key: str) -> bool:
    """Whether a fault of this key can make sizes wrong; which component a user puts in place of
    ours, unless it is the model, and what it is given, do not."""
    node, _, rest = key.partition(".")
    is_of_component = f"{rest}.".startswith("params.") or (node != "model" and rest == "_target_")
    return node in SIZE_NODES and not is_of_component


def _structure_faults(cfg: DictConfig) -> list[Fault]:
    return [*structure_faults(cfg), *secret_faults(cfg)]


def add_new(faults: list[Fault], found: Iterable[Fault]) -> None:
    """Append faults that are no consequence of those before.

    Those of one stage do not silence each other, except where one names another as related.
    """
    stage = list(found)
    silent = _keys(faults)
    stage = [fault for fault in stage if not _is_below(fault.key, silent)]
    silent |= _keys(stage)
    faults += [
        fault
        for fault in stage
        if not any(_is_below(key, silent) for key in fault.related if key != fault.key)
    ]


def _tell_of_both(faults: list[Fault], of_components: Iterable[Fault]) -> None:
    """Where a secret was typed for a key that its component does not take: no other way to write
    it would do, so the fix is that of the key."""
    by_key = {fault.key: fault for fault in of_components}
    for place, fault in enumerate(faults):
        other = by_key.get(fault.key)
        if other is not None and IS_TYPED_SECRET in fault.problem:
            faults[place] = replace(
                fault, problem=f"{fault.problem}\nit {other.problem}", fix=other.fix
            )


def _keys(faults: Iterable[Fault]) -> set[str]:
    return {fault.key for fault in faults}


def _is_below(key: str, nodes: set[str]) -> bool:
    """Whether `key` or a node that holds it is among `nodes`."""
    parts = key.split(".")
    return any(".".join(parts[: depth + 1]) in nodes for depth in range(len(parts)))
