import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferkit.runtime.logs import (
    HidingFormatter,
    hidden_output,
    hide_in_logs,
    log_run,
    log_to_file,
)

SECRET = "marker-6"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before, level = list(logger.handlers), logger.level
    formatters = [(handler, handler.formatter) for handler in before]
    yield logger
    for handler in logger.handlers:
        if handler not in before:
            handler.close()
    logger.handlers[:] = before
    for handler, formatter in formatters:
        handler.setFormatter(formatter)
    logger.setLevel(level)


def test_a_rank_s_log_has_no_secret_in_arguments_and_tracebacks(
    root: logging.Logger, tmp_path: Path
) -> None:
    log_to_file(tmp_path / "rank3.log", rank=3, level="INFO")
    try:
        raise ValueError(f"401 for {SECRET}")
    except ValueError:
        logging.getLogger("some.where").exception("asked with %s and %r", SECRET, [SECRET])

    text = (tmp_path / "rank3.log").read_text()
    assert text.startswith("[rank3] ")
    assert text.count("<secret SOME_API_KEY>") == 3 and SECRET not in text
    assert "Traceback" in text


def test_a_run_without_hydra_logs_to_file_and_terminal(
    root: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root.handlers[:] = []
    log_run(tmp_path / "inferkit.log", level="warning")
    logging.getLogger("x").info("not shown")
    logging.getLogger("x").warning("key %s", SECRET)

    for text in ((tmp_path / "inferkit.log").read_text(), capsys.readouterr().err):
        assert text.endswith("[x][WARNING] - key <secret SOME_API_KEY>\n")
        assert len(text.splitlines()) == 1


def test_handlers_keep_their_formats_and_are_changed_once(root: logging.Logger) -> None:
    own = logging.getLogger("tests.own")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("<%(message)s>"))
    own.addHandler(handler)
    try:
        hide_in_logs()
        hide_in_logs()
        record = own.makeRecord("x", logging.INFO, "f", 1, "key %s", (SECRET,), None)
        assert handler.format(record) == "<key <secret SOME_API_KEY>>"
        assert isinstance(handler.formatter, HidingFormatter)
        assert not isinstance(handler.formatter.inner, HidingFormatter)
    finally:
        own.removeHandler(handler)


def test_what_is_printed_has_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    with hidden_output():
        print("the key is", SECRET, flush=True)
        print({"key": SECRET}, file=sys.stderr)
        assert not sys.stdout.isatty() and sys.stdout.writable()
        assert sys.stdout.encoding.lower() == "utf-8"

    shown = capsys.readouterr()
    assert shown.out == "the key is <secret SOME_API_KEY>\n"
    assert shown.err == "{'key': '<secret SOME_API_KEY>'}\n"
