"""The whole configuration of every role, experiment and sweep, as committed under golden/, and
what follows from it.

A change of a default, an option or a rule of automatic values shows what it does to each.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from inferkit.config.origins import AUTOMATIC, SCHEMA
from inferkit.config.space import CONF_DIR, ConfigSpace
from inferkit.inspect.snapshot import Leaf, Snapshot
from inferkit.inspect.take import take_snapshot
from inferkit.inspect.wording import derived_text, value_text

GOLDEN = Path(__file__).parent / "golden"
GROUPS = ("role", "experiment", "sweep")
SPACE = ConfigSpace()
OPTIONS = [(group, option) for group in GROUPS for option in SPACE.options(group)]
HEAD = (
    "# Every key with the value that it runs with, and who has set it (`explain` tells the lines)."
)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_golden(
    space: ConfigSpace, golden: Callable[[Path, str], None], group: str, option: str
) -> None:
    words = command(option) if group == "sweep" else [f"+{group}={option}"]
    snapshot = take_snapshot(words, space)
    if any("not installed" in fault for fault in snapshot.faults):
        pytest.skip(snapshot.faults[0])
    assert snapshot.faults == ()

    params = OmegaConf.select(space.compose(words).hydra, "sweeper.params") or {}

    golden(GOLDEN / f"{group}_{option}.yaml", "".join(golden_lines(snapshot, params)))


def command(sweep: str) -> list[str]:
    """The words of the command in the second line of a sweep's file, without its model's folder."""
    text = (CONF_DIR.resolve() / f"sweep/{sweep}.yaml").read_text("utf-8").splitlines()[1]
    words = shlex.split(text.removeprefix("# python -m inferkit "))
    return [word for word in words if not word.startswith("model.path=")]


def test_nothing_is_left_of_options_that_are_gone() -> None:
    known = {f"{group}_{option}.yaml" for group, option in OPTIONS}
    found = {file.name for group in GROUPS for file in GOLDEN.glob(f"{group}_*.yaml")}

    assert found <= known


def golden_lines(snapshot: Snapshot, axes: Mapping[Any, Any]) -> Iterator[str]:
    yield f"{HEAD}\n# {snapshot.title}\n"
    for group, option in snapshot.choices.items():
        place = snapshot.choosers[group][-1].file or "command line"
        yield f"# {group}={value_text(option)}  {place}\n"
    for key, values in axes.items():
        yield f"# every value of {key}={values}\n"
    for key, leaf in snapshot.leaves.items():
        yield f"{line(key, leaf.value)}  # {origin(leaf)}\n" if key != PLATFORM else platform(leaf)
    for one in snapshot.derived:
        yield f"# {one.name} = {derived_text(one)}\n"


PLATFORM = "platform._target_"


def platform(leaf: Leaf) -> str:
    """As it was set: what `auto` becomes is a matter of the machine."""
    *_, chosen = [one for one in leaf.origins if one.kind != AUTOMATIC]
    return f"{line(PLATFORM, chosen.value)}  # {chosen.file}\n"


def line(key: str, value: Any) -> str:
    text = str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).strip()
    return f"{key}: {text.removesuffix('...').strip()}"


def origin(leaf: Leaf) -> str:
    last = leaf.origins[-1]
    if last.kind == SCHEMA:
        return "default"
    return f"automatic: {last.text}" if last.kind == AUTOMATIC else last.file
