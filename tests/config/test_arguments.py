import argparse
from pathlib import Path

import pytest

from inferkit.config.arguments import (
    UsageError,
    check_verb_flags,
    own_flags,
    parse_arguments,
)


def test_flags_and_overrides_in_any_order(tmp_path: Path) -> None:
    words = ["a=1", "-m", "b=2", "--config-dir", str(tmp_path), "c=3"]

    arguments = parse_arguments(words)

    assert arguments.overrides == ("a=1", "b=2", "c=3")
    assert arguments.is_multirun
    assert arguments.flags == ("-m", "--config-dir", str(tmp_path))
    assert arguments.config_dir == tmp_path
    assert arguments.shows == ""


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        (["--cfg", "job"], "cfg"),
        (["-c", "hydra", "a=1"], "cfg"),
        (["--info", "defaults"], "info"),
        (["--hydra-help"], "hydra_help"),
        (["-sc", "query=bash"], "shell_completion"),
        (["--run"], ""),
    ],
)
def test_shows(words: list[str], shows: str) -> None:
    assert parse_arguments(words).shows == shows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "--cfg", "job"], "-m starts a sweep and --cfg shows one configuration"),
        (["--confg", "job"], "--confg is no flag; did you mean --cfg?"),
        (["--multi-run"], "--multi-run is no flag; did you mean --multirun?"),
        (["--batch-size=8"], "options are written KEY=VALUE, for example scheduler.batch_size=8"),
        (["--colour"], "for example scheduler.batch_size=8"),
        (["--tensor-parallel-size=4"], "for example parallel=tp4"),
        (["--model", "x"], "for example model=VALUE"),
        (["--cfg"], "--cfg needs a value: job, hydra or all"),
        (["--package", "data"], "--package has no effect without --cfg job"),
        (["--config-name", "no"], "--config-name no: there is no no.yaml in conf/"),
        (["--config-path", "/no/such"], "--config-path /no/such: there is no such folder"),
        (["--cfg", "jobs"], "--cfg jobs: there is no such choice; did you mean job?"),
        (["--experimental-rerun", "x.pickle"], "loads a pickle, which inferkit never does"),
        (["--config-dir", "/no/such"], "--config-dir /no/such: there is no such folder"),
    ],
)
def test_usage_errors(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_arguments(words)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--cfg", "job"], "--cfg"),
        (["--info"], "--info"),
        (["--run"], "--run"),
        (["--hydra-help"], "--hydra-help"),
    ],
)
def test_flags_that_a_verb_would_ignore(words: list[str], flag: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag} has no effect with diff; leave it out"):
        check_verb_flags("diff", parse_arguments(words))


def test_flags_that_a_verb_takes(tmp_path: Path) -> None:
    check_verb_flags("check", parse_arguments(["-m", "--config-dir", str(tmp_path), "a=1,2"]))


def test_own_flags_and_their_values() -> None:
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--base")
        parser.add_argument("--format", choices=("text", "json"))
        parser.add_argument("--all", action="store_true")

    assert own_flags(add_options) == {"--base": (), "--format": ("text", "json"), "--all": None}
    assert own_flags(None) == {}
