"""Every message that a wrong command line gets is in messages.txt, to be read by eye."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferkit.cli import run
from inferkit.config.arguments import parse_arguments, program_name
from inferkit.config.check import Checker
from inferkit.config.faults import Command, key_of
from inferkit.config.preflight import CHECK, LAUNCHED, preflight
from inferkit.config.space import ConfigSpace
from tests.config.wrong_commands.commands import COMMANDS

HERE = Path(__file__).parent
SNAPSHOT = HERE / "messages.txt"
PROGRAM = ["python", "-m", "inferkit"]
PLACEHOLDERS = ("/path/to/", "VALUE", "INFERKIT_SECRET", "${oc.env:")
"""In a command that works with a value of the user's own."""


@pytest.fixture(autouse=True)
def in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    for name in (*LAUNCHED, "NOT_SET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def spaces(space: ConfigSpace) -> dict[Path | None, ConfigSpace]:
    """Folder of options -> the space with it; what one composes is kept for all commands."""
    return {None: space, Path("conf"): ConfigSpace(config_dir=HERE / "conf")}


@pytest.fixture
def told(
    spaces: dict[Path | None, ConfigSpace],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], tuple[int, str]]:
    """`told(line)` is the exit code and what a user reads of a command line."""

    def tell(line: str) -> tuple[int, str]:
        words = shlex.split(line)
        if is_run(words):
            # The same as `run` does, with a space that is not made anew each time.
            arguments = parse_arguments(words)
            command = arguments.command(program_name())
            message = preflight(command, spaces[arguments.config_dir]).message
            return (2 if message else 0), message
        with monkeypatch.context() as variables:
            while words[0].startswith("INFERKIT_"):
                variables.setenv(*words.pop(0).split("=", 1))
            code = run(words)
        shown = capsys.readouterr()
        assert shown.out == ""
        return code, shown.err.rstrip("\n")

    return tell


def is_run(words: list[str]) -> bool:
    """Whether this asks for a run or a sweep, and every flag and variable is right."""
    if {word for word in words if word.startswith("-")} - {"-m", "--config-dir"}:
        return False
    if "nowhere" in words or words[0].startswith("INFERKIT_"):
        return False
    return not words[0] or words[0][0] in "+~=-" or "=" in words[0]


def messages(told: Callable[[str], tuple[int, str]]) -> Iterator[str]:
    for title, lines in COMMANDS.items():
        yield f"{'=' * 100}\n{title}\n{'=' * 100}\n"
        for line in lines:
            code, message = told(line)
            shown = message.replace(str(HERE), "$PWD")
            yield f"$ python -m inferkit {line}\n{shown}\n(exit code {code})\n"


def test_messages_of_wrong_command_lines(
    told: Callable[[str], tuple[int, str]], golden: Callable[[Path, str], None]
) -> None:
    text = "\n".join(messages(told))

    golden(SNAPSHOT, text)
    assert text.count("$ python") == text.count("(exit code 2)") >= 150
    assert "Traceback" not in text


def working_commands() -> list[tuple[bool, str]]:
    """(holds a value of the user's own, command) of every message."""
    lines = SNAPSHOT.read_text("utf-8").splitlines()
    found = [
        ("yours" in line, lines[number + 1].strip())
        for number, line in enumerate(lines)
        if line.startswith("this works")
    ]
    return list(dict.fromkeys(found))


def test_the_commands_that_are_said_to_work_pass_the_check(
    spaces: dict[Path | None, ConfigSpace], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = working_commands()
    assert len(commands) >= 90
    refused = {}
    for is_example, line in commands:
        words = shlex.split(line)
        while words[0] != "python":
            monkeypatch.setenv(*words.pop(0).split("=", 1))
        assert words[:3] == PROGRAM
        words = words[3:]
        verb = words.pop(0) if words and words[0] == CHECK else ""
        arguments = parse_arguments(words)
        space = spaces[arguments.config_dir]
        if is_example:
            unknown = {key_of(word) for word in words if any(p in word for p in PLACEHOLDERS)}
            faults = Checker(space).check_overrides(arguments.overrides).faults
            problems = [str(fault) for fault in faults if fault.key not in unknown]
        else:
            command: Command = arguments.command(program_name(), verb)
            problems = [preflight(command, space).message]
        if any(problems):
            refused[line] = problems
    assert refused == {}


def test_a_refused_command_starts_nothing(tmp_path: Path) -> None:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "inferkit", "scheduler.bath_size=3", "+role=prefil"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}

    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("inferkit: 2 faults in the configuration; nothing was started\n")
    assert ended.stderr.endswith("  python -m inferkit scheduler.batch_size=3 +role=prefill\n")
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []
