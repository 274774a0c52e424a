"""What the documents promise: commands that compose, links that lead somewhere."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from inferkit.config.arguments import parse_arguments
from inferkit.config.preflight import check_composition, preflight
from inferkit.config.space import ConfigSpace
from inferkit.inspect.verbs import VERBS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    path
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("inferkit/*/*.md")])
    if not any(parent.is_symlink() for parent in path.parents)
]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
PROGRAM = "python -m inferkit"


def fenced_lines(document: Path) -> list[str]:
    """Lines of the code blocks of a document; one that goes on in the next is joined to it."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", document.read_text("utf-8"), re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def commands() -> list[str]:
    """Command lines of the documents that start a run, with this checkout's own options only."""
    found = [line for path in DOCUMENTS for line in fenced_lines(path)]
    found = [line for line in found if line.startswith((f"{PROGRAM} ", "inferkit "))]
    return [line for line in found if "--config-dir DIR" not in line]


def set_up_lines() -> list[str]:
    return [line for line in fenced_lines(ROOT / "README.md") if line.startswith("python3 -m venv")]


@pytest.mark.parametrize("line", commands())
def test_command_composes(line: str) -> None:
    words = shlex.split(line.removeprefix(PROGRAM).removeprefix("inferkit"))
    verb = VERBS.get(words[0])
    arguments = parse_arguments(words[1:], verb.add_options) if verb else parse_arguments(words)
    # `diff` takes sets of overrides in a word each; other words without '=' are keys or folders.
    sets = map(shlex.split, arguments.overrides) if words[0] == "diff" else [arguments.overrides]
    for words in sets:
        overrides = tuple(word for word in words if "=" in word or verb is None)
        command = replace(arguments, overrides=overrides).command(PROGRAM)
        # The folders that the examples name are not here, so only a sweep is checked to the end.
        is_sweep = arguments.is_multirun or any(word.startswith("+sweep=") for word in overrides)
        check = preflight if is_sweep else check_composition
        verdict = check(command, ConfigSpace())
        if "not installed" in verdict.message:
            pytest.skip(verdict.message)
        assert verdict.is_good, verdict.message


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    targets = LINK.findall(document.read_text("utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_two_commands_set_everything_up() -> None:
    main_job, tests = set_up_lines()
    assert main_job.endswith("python -m inferkit")
    assert tests.endswith("python -m pytest -n auto")
    assert all(" -c constraints.txt " in line for line in (main_job, tests))


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    if not script.exists():
        return  # an unpacked sdist
    _, tests = set_up_lines()
    install = re.search(r"-e '(.+?)'", tests)
    assert install is not None
    assert f'-e "{install.group(1)}"' in script.read_text("utf-8")
    last = script.read_text("utf-8").rstrip().splitlines()[-1]
    assert last.startswith('"$BIN/python" -m pytest')
