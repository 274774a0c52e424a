"""What a run directory must hold so that its numbers can be proven and repeated.

Torch-free. Every file appears whole or not at all.
"""

import hashlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from inferkit.config.schema import InferenceConfig
from inferkit.config.secrets import secret_variables
from inferkit.core.secrets import hide, recorded

PROVENANCE_FILE = "provenance.json"
RESOLVED_FILE = "config.resolved.yaml"
PACKAGES = (
    "inferkit",
    "torch",
    "torch_npu",
    "transformers",
    "tokenizers",
    "jinja2",
    "safetensors",
    "gguf",
    "numpy",
    "hydra-core",
    "omegaconf",
    "huggingface-hub",
    "fastapi",
    "uvicorn",
    "pyzmq",
    "msgspec",
)
VARIABLES = re.compile(
    r"INFERKIT_.*|OMP_.*|MKL_.*|KMP_.*|GOMP_.*|OPENBLAS_.*|ONEDNN_.*|DNNL_.*|MALLOC_.*|ATEN_.*"
    r"|TORCH.*|PYTORCH.*|CUDA_.*|NVIDIA_TF32_OVERRIDE|NCCL_.*|GLOO_.*|ASCEND_.*|HCCL_.*"
    r"|TASK_QUEUE_ENABLE|HF_HOME|HF_HUB_OFFLINE|HF_ENDPOINT|LD_PRELOAD|PYTHONHASHSEED"
)
"""Environment variables that change results or speed."""
SECRETS = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
GIT_TIMEOUT_S = 10


def write_run(
    run_dir: Path,
    cfg: InferenceConfig,
    *,
    command: str,
    overrides: Sequence[str],
    **facts: Any,
) -> None:
    """Write the resolved configuration and everything that is known before the run starts."""
    write_text(run_dir / RESOLVED_FILE, resolved_yaml(cfg))
    record(
        run_dir,
        command=command,
        overrides=list(overrides),
        config_hash=config_hash(cfg),
        seed=cfg.data.seed,
        platform_target=cfg.platform._target_,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        versions=package_versions(),
        git=git_state(Path(__file__).resolve().parent),
        environment=environment(os.environ, secrets=secret_variables(cfg)),
        host=host_facts(),
        python=sys.version,
        **facts,
    )


def record(run_dir: Path, **facts: Any) -> None:
    """Merge facts into provenance.json; dictionaries are merged, other values replaced.

    Processes of one run may call this one after the other, not at the same time.
    """
    path = run_dir / PROVENANCE_FILE
    known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name, value in facts.items():
        old = known.get(name)
        known[name] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    write_json(path, known)


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part.

    Secrets that its texts hold (an error may quote one) are hidden.
    """
    text = json.dumps(_hidden(value), indent=2, ensure_ascii=False, default=lambda o: hide(str(o)))
    write_text(path, text + "\n")


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _hidden(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(child) for child in value]
    return hide(value) if isinstance(value, str) else value


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def resolved_yaml(cfg: InferenceConfig) -> str:
    """YAML of every key, in the schema's order."""
    return OmegaConf.to_yaml(OmegaConf.create(plain(cfg)))


def plain(cfg: InferenceConfig) -> dict[str, Any]:
    """Nested dictionaries, lists, texts and numbers of every key; secrets as `${oc.env:NAME}`."""
    return {entry.name: _plain(getattr(cfg, entry.name)) for entry in fields(cfg)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    return value.name if isinstance(value, Enum) else recorded(value)


def config_hash(cfg: InferenceConfig) -> str:
    text = json.dumps(plain(cfg), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def package_versions() -> dict[str, str | None]:
    """Versions from package metadata; nothing is imported. None = not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that holds `folder`, and files that differ from it; else None."""
    tracked = _git(folder, "ls-files", "--error-unmatch", ".")
    commit = _git(folder, "rev-parse", "HEAD")
    if tracked is None or commit is None:
        return None  # also a wheel inside the environment folder of some other checkout
    changed = _git(folder, "status", "--porcelain", "--", ":/") or ""
    files = [line[3:] for line in changed.splitlines()]
    return {"commit": commit, "is_dirty": bool(files), "changed_files": files[:50]}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.rstrip("\n") if result.returncode == 0 else None


def environment(variables: Mapping[str, str], *, secrets: Collection[str] = ()) -> dict[str, str]:
    """Variables that change behaviour, without secrets and without credentials in addresses."""
    return {
        name: re.sub(r"//[^/@\s]+@", "//", value)
        for name, value in sorted(variables.items())
        if VARIABLES.fullmatch(name) and not SECRETS.search(name) and name not in secrets
    }


def host_facts() -> dict[str, Any]:
    """What of this machine changes tokens or speed, and its name."""
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
    }


def processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.processor()
