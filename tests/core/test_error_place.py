import json
from pathlib import Path

import pytest

from inferkit.core.error_place import is_raised_by_inferkit, place_of, told, told_with_place
from inferkit.core.place import RankPlace


def caught(function: object, *arguments: object) -> Exception:
    try:
        function(*arguments)  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("it should have failed")


def test_the_innermost_frame_of_a_user_s_code_is_told() -> None:
    error = caught(lambda: json.loads("{"))

    assert place_of(error).startswith(f"{Path(__file__).relative_to(Path.cwd())}:")
    assert place_of(error).endswith("in <lambda>")
    assert told_with_place(error).startswith("JSONDecodeError: Expecting property name")


def test_a_frame_inside_the_component_comes_first() -> None:
    error = caught(lambda: json.loads("{"))
    folder = Path(json.__file__).resolve().parent

    assert "decoder.py:" in place_of(error, inside=folder)


def test_inferkit_s_own_frames_are_told_where_there_are_no_others() -> None:
    error = caught(RankPlace, "no such argument")
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next

    assert place_of(error) == ""  # raised by the call itself
    assert not is_raised_by_inferkit(error)


def test_an_error_without_a_message_is_its_type() -> None:
    assert told(ValueError()) == "ValueError"
    assert told_with_place(ValueError("never raised")) == "ValueError: never raised"


def test_a_syntax_error_is_where_it_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("x = 1\ny = (\n")
    text = (tmp_path / "broken.py").read_text()

    error = caught(compile, text, str(tmp_path / "broken.py"), "exec")

    assert told_with_place(error) == "SyntaxError: '(' was never closed\n  at broken.py:2"
