"""Rules about components: every `_target_`, `params` and `model.custom_params`.

Classes are read from their source, so a check imports nothing and torch stays out.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from inferkit.config.build import node_keywords, not_allowed, runtime_keywords
from inferkit.config.faults import Fault, Fix, closest, did_you_mean, show
from inferkit.config.resolve import resolve_platform
from inferkit.config.schema import InferenceConfig, TargetConfig
from inferkit.config.targets import Definition, SourceIndex, TargetError, is_allowed

CUSTOM_PARAMS = "CUSTOM_PARAMS"


def check_components(cfg: InferenceConfig, index: SourceIndex) -> Iterator[Fault]:
    """Faults of every node that names a component."""
    yield from _bad_prefixes(cfg.allowed_targets)
    nodes: dict[str, TargetConfig] = {
        "platform": resolve_platform(cfg.platform),
        "engine": cfg.engine,
        "kv_cache": cfg.kv_cache,
        "exe_mode": cfg.exe_mode,
        "scheduler": cfg.scheduler,
        "runner": cfg.runner,
    }
    if cfg.model.with_ckpt:
        nodes["model.loader"] = cfg.model.loader
    if cfg.role in ("prefill", "decode") and cfg.disagg.transfer._target_:
        nodes["disagg.transfer"] = cfg.disagg.transfer
    yield from _check_model(cfg, index)
    for key, node in nodes.items():
        found = _find(f"{key}._target_", node._target_, cfg.allowed_targets, index)
        if isinstance(found, Fault):
            yield found
        else:
            yield from _check_keywords(key, node, found, index, runtime_keywords(key, cfg.role))


def _bad_prefixes(prefixes: Sequence[str]) -> Iterator[Fault]:
    for prefix in prefixes:
        if not all(part.isidentifier() for part in prefix.removesuffix(".").split(".")):
            yield Fault(
                key="allowed_targets",
                given=f"allowed_targets={show(list(prefixes))}",
                problem=f"{prefix!r} is no dotted prefix such as mypackage or mypackage.loaders",
                fix=Fix(drop=("allowed_targets",)),
            )


def _find(
    key: str, target: str, allowed_targets: Sequence[str], index: SourceIndex
) -> Definition | Fault:
    given, related = f"{key}={target}", ("allowed_targets",)
    try:
        found = index.find(target)
    except TargetError as error:
        corrected = error.corrected(target)
        fix = Fix(add=(f"{key}={corrected}",)) if corrected else Fix(drop=(key,))
        return Fault(key=key, given=given, problem=str(error), fix=fix, related=related)
    if is_allowed(target, allowed_targets):
        return found
    top = target.split(".")[0]
    if top in sys.stdlib_module_names:
        problem, fix = "is a part of Python, and no component of inferkit", Fix(drop=(key,))
    else:
        problem = not_allowed(target, allowed_targets)
        fix = Fix(add=(f"allowed_targets={show([*allowed_targets, top])}",))
    return Fault(key=key, given=given, problem=problem, fix=fix, related=related)


def _check_keywords(
    key: str, node: TargetConfig, found: Definition, index: SourceIndex, runtime: frozenset[str]
) -> Iterator[Fault]:
    """The constructor must take the node's keys and `runtime`, and `params` beside them."""
    keywords = index.keywords(found)
    own = set(node_keywords(node))
    given = own | runtime
    target = f"{key}._target_={node._target_}"
    refused = sorted(given - keywords.names) if not keywords.takes_any else []
    if refused:
        yield Fault(
            key=f"{key}._target_",
            given=target,
            problem=f"its constructor does not take {', '.join(refused)}, which it is called "
            "with; add these keywords, or **kwargs that go on to super().__init__",
        )
    missing = sorted(keywords.required - given - set(node.params))
    if missing:
        yield Fault(
            key=f"{key}._target_",
            given=target,
            problem=f"its constructor needs {', '.join(missing)}; set "
            + " ".join(f"+{key}.params.{name}=..." for name in missing),
            fix=Fix(add=tuple(f"+{key}.params.{n}=VALUE" for n in missing), is_example=True),
        )
    for name, value in node.params.items():
        if name in own:
            problem = f"is a key of the node itself; set {key}.{name}"
            fix = Fix(add=(f"{key}.{name}={show(value)}",))
        elif name in runtime:
            problem, fix = f"is given by inferkit itself to {key}", Fix()
        elif not keywords.takes_any and name not in keywords.names:
            allowed = sorted(keywords.names - given)
            guess = closest(name, allowed)
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes no params"
            problem = f"is no argument of {node._target_}{did_you_mean(guess)}\n{takes}"
            fix = Fix(add=(f"+{key}.params.{guess}={show(value)}",) if guess else ())
        else:
            continue
        name = f"{key}.params.{name}"
        fix = replace(fix, drop=(name, f"{key}.params"))
        yield Fault(key=name, given=f"{name}={show(value)}", problem=problem, fix=fix)


def _check_model(cfg: InferenceConfig, index: SourceIndex) -> Iterator[Fault]:
    target = cfg.model._target_
    found = _find("model._target_", target, cfg.allowed_targets, index)
    if isinstance(found, Fault):
        yield found
        return
    declared = index.attribute(found, CUSTOM_PARAMS) or ()
    for name, value in cfg.model.custom_params.items():
        if name not in declared and found.node is not None:
            guess = closest(name, declared)
            takes = f"it reads {', '.join(declared)}" if declared else "it reads none"
            yield Fault(
                key=f"model.custom_params.{name}",
                given=f"model.custom_params.{name}={show(value)}",
                problem=f"is not read by {target}{did_you_mean(guess)}\n{takes} "
                f"(declared in its {CUSTOM_PARAMS})",
                fix=Fix(
                    add=(f"+model.custom_params.{guess}={show(value)}",) if guess else (),
                    drop=(f"model.custom_params.{name}", "model.custom_params"),
                ),
            )
