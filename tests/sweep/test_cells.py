import json
from pathlib import Path

import pytest

from inferkit.core.errors import AddressError, RequestError, WorkerError
from inferkit.sweep.cells import FAILED, INTERRUPTED, RESULT_FILE, JobResult, read_result


def result(number: int, **changes: str) -> JobResult:
    return JobResult(number=number, overrides=("a=1", f"b={number}"), **changes)


def failed(number: int) -> JobResult:
    try:
        raise WorkerError("worker 0 died\nand more")
    except WorkerError as error:
        return result(number).failed(error)


def test_a_failure_keeps_first_line_and_traceback() -> None:
    outcome = failed(3)

    assert (outcome.number, outcome.status, outcome.error) == (3, FAILED, "worker 0 died")
    assert outcome.traceback is not None
    assert "test_cells.py" in outcome.traceback
    assert result(0).failed(KeyError()).error == "KeyError"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KeyboardInterrupt(), "ended by SIGINT"),
        (SystemExit(128 + 15), "ended by SIGTERM"),
        (SystemExit("enough"), "ended by its own exit"),
        (SystemExit(3), "ended by its own exit"),
    ],
)
def test_an_interrupted_job_names_the_signal(error: BaseException, cause: str) -> None:
    assert isinstance(error, KeyboardInterrupt | SystemExit)
    outcome = result(2).interrupted(error)

    assert (outcome.status, outcome.error, outcome.traceback) == (INTERRUPTED, cause, None)


@pytest.mark.parametrize("kind", [AddressError, RequestError])
def test_what_the_user_gave_needs_no_traceback(kind: type[Exception]) -> None:
    error = kind("no", "and more", key="a.b") if kind is AddressError else kind("no and more")
    outcome = result(0).failed(error)

    assert (outcome.status, outcome.error, outcome.traceback) == (FAILED, "no and more", None)


def test_write(tmp_path: Path) -> None:
    failed(1).write(tmp_path)

    stored = json.loads((tmp_path / RESULT_FILE).read_text())
    assert stored["status"] == FAILED
    assert stored["overrides"] == ["a=1", "b=1"]


def test_read(tmp_path: Path) -> None:
    assert read_result(tmp_path) is None
    failed(1).write(tmp_path)
    assert read_result(tmp_path) == failed(1)

    for text in ("", "[]", "{}", '{"number": 1}'):
        (tmp_path / RESULT_FILE).write_text(text)
        assert read_result(tmp_path) is None
