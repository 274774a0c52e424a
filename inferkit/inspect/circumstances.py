"""With what a run was made, beside its configuration: code, versions, files, machine, environment.

Pure: from what a run directory records in provenance.json.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

ID_DIGITS = 10
DECIDING_FILES = ("model file ", "data ")
"""Of files that a configuration names by their place, the contents belong to it."""
OF_ONE_RUN = re.compile(r"TORCHELASTIC_.*|GLOO_SOCKET_IFNAME")
"""Variables that a run sets for itself."""


def circumstances(provenance: Mapping[str, Any]) -> dict[str, str]:
    """`version torch` -> `2.13.0`; what was not recorded is left out."""
    return dict(_facts(provenance))


def _facts(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _code(provenance)
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


def _code(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A digest of all files that can run, so that a changed test is no other code; the commit.

    Where no digest was recorded, changed files make it unknown what ran.
    """
    git = provenance.get("git") or {}
    digest = str(provenance.get("identity", {}).get("code", ""))[:ID_DIGITS]
    commit = str(git.get("commit", ""))[:ID_DIGITS]
    if digest:
        yield "code", f"files {digest}"
    if commit:
        yield "commit", f"{commit} with changes" if git.get("is_dirty") and not digest else commit


def _file(facts: Any) -> str:
    """Size and digest."""
    if not isinstance(facts, Mapping):
        return str(facts)[: 2 * ID_DIGITS]
    digests = (str(value)[:ID_DIGITS] for name, value in facts.items() if "sha256" in name)
    return " ".join([f"{facts.get('size', 0):,} bytes", *digests])
