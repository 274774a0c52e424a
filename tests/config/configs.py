"""Typed configurations that rules are tried on, without files or hydra."""

from dataclasses import replace
from typing import Any

from inferkit.config.rules import check_rules
from inferkit.config.schema import ExeModeConfig, InferenceConfig, ModelConfig, PlatformConfig

BASE = InferenceConfig(
    model=ModelConfig(_target_="x", name="x"),
    platform=PlatformConfig(_target_="auto"),
    exe_mode=ExeModeConfig(_target_="x", name="eager"),
)


def changed(**values: Any) -> InferenceConfig:
    """BASE with `node__key=value` in place."""
    cfg = BASE
    for name, value in values.items():
        node, _, key = name.partition("__")
        cfg = replace(cfg, **{node: replace(getattr(cfg, node), **{key: value})})
    return cfg


def faults(**values: Any) -> list[str]:
    return [str(fault) for fault in check_rules(changed(**values)).faults]


def warnings(**values: Any) -> list[str]:
    findings = check_rules(changed(**values))
    assert findings.faults == []
    return [str(warning) for warning in findings.warnings]
