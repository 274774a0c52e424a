"""The YAML files: composed as committed, and free of what has bitten Hydra's users."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from inferkit.config.check import Checker
from inferkit.config.provenance import resolved_yaml
from inferkit.config.schema import InferenceConfig
from inferkit.config.space import CONF_DIR, ConfigSpace

CONF = CONF_DIR.resolve()
FILES = sorted(CONF.rglob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
KEYWORDS = {"override", "optional"}
GLOBAL_GROUPS = {"role", "experiment", "sweep"}
SNAKE_CASE = re.compile(r"_?[a-z][a-z0-9_]*_?")
# What YAML 1.1 reads otherwise than it looks: 12:30 is 750, 010 is 8, 1_000 is 1000.
SURPRISES = {
    "sexagesimal": re.compile(r"^[-+]?\d+(:\d+)+(\.\d+)?$"),
    "octal": re.compile(r"^0\d+$"),
    "underscore": re.compile(r"^\d[\d_]*_[\d_]*$"),
    "word as boolean": re.compile(r"^(on|off|yes|no|y|n)$", re.IGNORECASE),
}


def relative(path: Path) -> str:
    return str(path.relative_to(CONF))


def scalars(path: Path) -> Iterator[yaml.ScalarNode]:
    """Plain scalars of a file as they are written."""
    waiting: list[yaml.Node | None] = [yaml.compose(path.read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.ScalarNode) and node.style is None:
            yield node


def surprises(path: Path) -> list[str]:
    return [
        f"line {node.start_mark.line + 1}: {node.value} ({kind}); quote it"
        for node in scalars(path)
        for kind, pattern in SURPRISES.items()
        if pattern.match(node.value)
    ]


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text("utf-8")) or {}


def defaults_of(path: Path) -> list[Any]:
    return list(load(path).get("defaults", []))


def keyword_faults(entries: list[Any]) -> list[str]:
    """Misspelt `override` and `optional`, which Hydra ignores without a word."""
    faults = []
    for entry in entries:
        for key in entry if isinstance(entry, dict) else ():
            *words, _ = str(key).split()
            faults += [word for word in words if word not in KEYWORDS]
    return faults


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_style(path: Path) -> None:
    text = path.read_text("utf-8")

    first = next(line for line in text.splitlines() if not line.startswith("# @package"))
    assert first.startswith("# "), "a file opens with one line of why"
    assert len(first) > 20
    assert text.isascii()
    assert SNAKE_CASE.fullmatch(path.stem)
    assert "\t" not in text


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_values_are_what_they_look_like(path: Path) -> None:
    assert surprises(path) == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_defaults_lists(path: Path) -> None:
    entries = defaults_of(path)

    assert keyword_faults(entries) == []
    has_values = set(load(path)) - {"defaults"}
    if entries and has_values:
        assert entries[-1] == "_self_", "values after a defaults list need _self_, last"
    assert not any("optional" in str(entry) for entry in entries)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_global_files_are_diffs_over_groups(path: Path) -> None:
    group = relative(path).split("/")[0]
    text = path.read_text("utf-8")

    if group not in GLOBAL_GROUPS:
        assert "@package" not in text
        return
    assert text.startswith("# @package _global_\n")
    for entry in defaults_of(path):
        keys = list(entry) if isinstance(entry, dict) else [entry]
        assert all(key == "_self_" or str(key).startswith("override /") for key in keys)
        assert group == "role" or not any("/role" in str(key) for key in keys)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_resolver_of_a_running_program_in_the_job_part(path: Path) -> None:
    job = {key: value for key, value in load(path).items() if key != "hydra"}

    assert not re.search(r"\$\{(now|hydra|oc\.select):", yaml.safe_dump(job))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("at: 12:30", "sexagesimal"),
        ("id: 010", "octal"),
        ("count: 1_000", "underscore"),
        ("mode: off", "word as boolean"),
        ("list: [yes]", "word as boolean"),
        ("at: '12:30'", None),
        ("path: pypi:x==1", None),
        ("count: 10", None),
    ],
)
def test_surprises_sees(tmp_path: Path, text: str, found: str | None) -> None:
    (tmp_path / "x.yaml").write_text(text + "\n")

    assert [found in s for s in surprises(tmp_path / "x.yaml") if found] == (
        [True] if found else []
    )


def test_keyword_faults_sees() -> None:
    assert keyword_faults([{"overide /a": "b"}, {"optioal c": "d"}]) == ["overide", "optioal"]
    assert keyword_faults([{"override /a": "b"}, {"model": "x"}, "_self_"]) == []


def test_role_is_not_in_the_defaults_list() -> None:
    names = {str(key) for entry in defaults_of(CONF / "config.yaml") if isinstance(entry, dict)
             for key in entry}  # fmt: skip
    assert "role" not in names
    assert defaults_of(CONF / "config.yaml")[0] == "schema"


def options() -> list[str]:
    space = ConfigSpace()
    signs = {group: "" if group in space.defaults else "+" for group in space.groups}
    return [f"{signs[group]}{group}={option}" for group in signs for option in space.options(group)]


OF_ROLES = {
    "runner=online": "serve",
    "runner=router": "router",
    "runner=cluster": "cluster",
    "runner=load": "serve",
    "scheduler=prefill": "prefill",
    "scheduler=decode": "decode",
    "disagg/transfer=shared_memory": "prefill",
    "disagg/transfer=tcp": "cluster",
    "disagg/transfer=mooncake": "decode",
    "disagg/transfer=memfabric": "prefill",
}
"""Options that go with one role, or a few."""


@pytest.mark.parametrize("choice", options())
def test_every_option_composes_and_its_target_fits(space: ConfigSpace, choice: str) -> None:
    """Also binds the node's keys to the target's constructor (inferkit.config.components)."""
    any_size = [f"model={option}" for option in space.model_targets]
    needs_path = choice in any_size and choice != "model=smollm2_135m"
    extra = ["model.path=org/any"] if needs_path else []
    if choice in OF_ROLES:
        extra = [f"+role={OF_ROLES[choice]}"]

    checked = Checker(space, is_run=False).check_overrides([choice, *extra])
    if any("not installed" in fault.problem for fault in checked.faults):
        pytest.skip(str(checked.faults[0]))

    assert [str(fault) for fault in checked.faults] == []


@pytest.mark.parametrize("choice", [choice for choice in options() if choice[0] != "+"])
def test_an_option_holds_only_what_differs_from_the_schema(choice: str) -> None:
    group, _, option = choice.partition("=")
    values = load(CONF / group / f"{option}.yaml")
    default = OmegaConf.to_container(OmegaConf.structured(InferenceConfig()), enum_to_str=True)
    assert isinstance(default, dict)

    for name in group.split("/"):
        default = default[name]
    repeated = {key for key, value in values.items() if default.get(key) == value}

    # tp1 is all defaults; a file cannot be empty.
    assert repeated == ({"world_size"} if choice == "parallel=tp1" else set())


def test_resolved_configuration_is_readable_in_a_bare_program(space: ConfigSpace) -> None:
    checked = Checker(space).check_overrides([])
    assert checked.config is not None

    read = OmegaConf.to_container(OmegaConf.create(resolved_yaml(checked.config)), resolve=True)

    merged = OmegaConf.merge(OmegaConf.structured(InferenceConfig), read)
    assert OmegaConf.to_object(merged) == checked.config


def test_golden_default(space: ConfigSpace, golden: Callable[[Path, str], None]) -> None:
    """A change of the default configuration is seen in review."""
    golden(GOLDEN / "default.yaml", OmegaConf.to_yaml(space.compose_job()))
