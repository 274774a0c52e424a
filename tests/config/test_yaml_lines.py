from pathlib import Path

import pytest

from inferkit.config.yaml_lines import key_lines, line_of

TEXT = """\
# why
scheduler:
  batch_size: 8

  params: {window: 4, other:
    [1, 2]}
common: &x
  y: 1
model:
  arch:
    <<: *x
    z: 2
"""


@pytest.fixture
def lines(tmp_path: Path) -> dict[str, int]:
    file = tmp_path / "some.yaml"
    file.write_text(TEXT)
    return key_lines(file)


def test_every_key_has_the_line_that_it_is_written_on(lines: dict[str, int]) -> None:
    assert lines["scheduler"] == 2
    assert lines["scheduler.batch_size"] == 3
    assert lines["scheduler.params.window"] == lines["scheduler.params.other"] == 5
    assert lines["model.arch.z"] == 12


def test_a_key_without_a_line_has_that_of_its_node(lines: dict[str, int]) -> None:
    assert line_of(lines, "scheduler.batch_size") == 3
    assert line_of(lines, "model.arch.y") == 10  # from another place
    assert line_of(lines, "data.limit") == 0


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")

    assert key_lines(file) == {}
