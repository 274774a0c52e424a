import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferkit.config.schema import InferenceConfig
from inferkit.core.errors import AddressError, ConfigError
from inferkit.sweep.job import Job, with_override

COMMAND = "python -m inferkit +role=serve disagg.http_port=8000 'disagg.prefill_ips=[a,b]'"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The log of the run's own process."""
    handler = logging.FileHandler(tmp_path / "inferkit.log")
    logging.getLogger().addHandler(handler)
    yield tmp_path / "inferkit.log"
    logging.getLogger().removeHandler(handler)
    handler.close()


def failing(error: Exception) -> InferenceConfig:
    raise error


def test_a_port_in_use_is_no_traceback_and_comes_with_a_command_that_works(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = AddressError(
        "disagg.http_port=8000", "is in use", key="disagg.http_port", fix="disagg.http_port=0"
    )

    Job(run_dir=tmp_path, command=COMMAND, overrides=()).run(lambda: failing(error))

    assert capsys.readouterr().err.splitlines() == [
        "inferkit: disagg.http_port=8000 is in use",
        "this works:",
        "  python -m inferkit +role=serve 'disagg.prefill_ips=[a,b]' disagg.http_port=0",
    ]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["traceback"]) == ("failed", None)
    assert result["error"] == "disagg.http_port=8000 is in use"
    assert "disagg.http_port=8000 is in use" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_an_error_for_users_is_its_message_and_another_has_its_place(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(run_dir=tmp_path, command=COMMAND, overrides=())

    job.run(lambda: failing(ConfigError("model.path=/x is not there")))
    assert capsys.readouterr().err == "inferkit: model.path=/x is not there\n"

    job.run(lambda: failing(ZeroDivisionError("one over nothing")))
    first, place, where = capsys.readouterr().err.splitlines()
    assert first == "inferkit: ZeroDivisionError: one over nothing"
    assert re.fullmatch(r"  at tests/sweep/test_job_errors\.py:\d+ in failing", place)
    assert where == f"  the whole traceback is in {log}"
    assert log.read_text().count("Traceback") == 2


def test_an_override_takes_the_place_of_the_one_of_its_key() -> None:
    assert with_override("inferkit a.b=1 '+c=[1,2]' a.b=2", "a.b=0") == "inferkit '+c=[1,2]' a.b=0"
