"""With what a run was made, beside its configuration: code, versions, files, machine, environment.

Pure: from what a run directory records in provenance.json.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

ID_DIGITS = 10
OF_ONE_RUN = re.compile(r"TORCHELASTIC_.*|GLOO_SOCKET_IFNAME")
"""Variables that a run sets for itself."""


def circumstances(provenance: Mapping[str, Any]) -> dict[str, str]:
    """`version torch` -> `2.13.0`; what was not recorded is left out."""
    return dict(_facts(provenance))


def _facts(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    code = _code(provenance)
    if code:
        yield "code", code
    for name, version in provenance.get("versions", {}).items():
        yield f"version {name}", version or "not installed"
    python = str(provenance.get("python", "")).partition(" ")[0]
    if python:
        yield "version python", python
    identity = provenance.get("identity", {})
    for kind, label in (("components", "component"), ("model", "model file"), ("dataset", "data")):
        for name, file in (identity.get(kind) or {}).items():
            yield f"{label} {name}", _file(file)
    for name, value in provenance.get("host", {}).items():
        yield f"host {name.replace('_', ' ')}", str(value)
    environment = provenance.get("environment", {}) | provenance.get("rank_environment", {})
    for name, value in environment.items():
        if not OF_ONE_RUN.fullmatch(name):
            yield f"environment {name}", str(value)


def _code(provenance: Mapping[str, Any]) -> str:
    """The commit, and a digest of all files where some differ from it."""
    git = provenance.get("git") or {}
    digest = str(provenance.get("identity", {}).get("code", ""))[:ID_DIGITS]
    commit = str(git.get("commit", ""))[:ID_DIGITS]
    if commit and not git.get("is_dirty"):
        return commit
    files = f"files {digest}" if digest else ""
    return f"{commit} with changes, {files}".removesuffix(", ") if commit else files


def _file(facts: Any) -> str:
    """Size and digest."""
    if not isinstance(facts, Mapping):
        return str(facts)[: 2 * ID_DIGITS]
    digests = (str(value)[:ID_DIGITS] for name, value in facts.items() if "sha256" in name)
    return " ".join([f"{facts.get('size', 0):,} bytes", *digests])
