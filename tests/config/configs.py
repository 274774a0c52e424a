"""Typed configurations that rules are tried on, without files or hydra."""

from dataclasses import replace
from typing import Any

from inferkit.config.network_rules import SHARED_MEMORY
from inferkit.config.role_rules import ROLES
from inferkit.config.rules import check_rules
from inferkit.config.schema import (
    ExeModeConfig,
    InferenceConfig,
    ModelConfig,
    PlatformConfig,
    RunnerConfig,
    TransferConfig,
)

OWN_PORTS = {"prefill": {"http_port": 8001}, "decode": {"http_port": 8100, "zmq_port": 5557}}

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


def in_role(role: str = "serve", **values: Any) -> InferenceConfig:
    """The same as the parts of a role would have it."""
    parts = ROLES[role]
    disagg = dict[str, Any](OWN_PORTS.get(role, {}), mode=parts.mode)
    if role in ("prefill", "decode", "cluster"):
        disagg["transfer"] = TransferConfig(_target_=SHARED_MEMORY)
    of_role: dict[str, Any] = {f"disagg__{name}": value for name, value in disagg.items()}
    return replace(
        changed(**of_role | {"scheduler___target_": parts.scheduler} | values),
        role=role,
        runner=RunnerConfig(_target_=parts.runner),
    )


def faults_of(cfg: InferenceConfig) -> list[str]:
    return [str(fault) for fault in check_rules(cfg).faults]


def faults(**values: Any) -> list[str]:
    return [str(fault) for fault in check_rules(changed(**values)).faults]


def warnings(**values: Any) -> list[str]:
    findings = check_rules(changed(**values))
    assert findings.faults == []
    return [str(warning) for warning in findings.warnings]
