import json
from pathlib import Path

import pytest

from inferkit.core.errors import ConfigError
from inferkit.inspect.same_tokens import compare_tokens, read_tokens


def write(path: Path, *lines: object) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_tokens_of_a_run_and_of_a_load(tmp_path: Path) -> None:
    assert read_tokens(tmp_path) is None
    write(tmp_path / "requests.jsonl", {"request_id": 1, "token_ids": [4]})
    assert read_tokens(tmp_path) == {1: [4]}
    write(tmp_path / "generations.jsonl", {"request_id": 0, "token_ids": [], "text": "x"})
    assert read_tokens(tmp_path) == {0: []}


def test_a_line_that_is_no_request_is_named(tmp_path: Path) -> None:
    write(tmp_path / "generations.jsonl", {"request_id": 0})
    with pytest.raises(ConfigError, match=r"generations.jsonl has a line without .*'token_ids'"):
        read_tokens(tmp_path)


def test_equal_tokens() -> None:
    agreement = compare_tokens({0: [1, 2], 1: []}, {1: [], 0: [1, 2]})
    assert agreement.is_same
    assert str(agreement) == "same tokens: 2 of 2 requests"


def test_each_difference_has_a_line() -> None:
    recorded = {0: [1, 2], 1: [1, 2], 2: [1], 3: [7]}
    replayed = {0: [1, 3], 1: [1], 3: [7], 4: [1]}

    agreement = compare_tokens(recorded, replayed)

    assert str(agreement) == (
        "other tokens: 4 of 4 requests\n"
        "  request 0: token 1 is 3, was 2\n"
        "  request 1: 1 tokens, were 2; all that both have are equal\n"
        "  request 2: is missing\n"
        "  request 4: is not in the recorded run"
    )


def test_many_differences_are_cut() -> None:
    recorded = {request_id: [1] for request_id in range(9)}
    text = str(compare_tokens(recorded, {request_id: [2] for request_id in range(9)}))
    assert text.splitlines()[-1] == "  and 4 more"


def test_of_a_run_that_broke_off_only_what_it_had_finished_counts() -> None:
    agreement = compare_tokens({0: [1]}, {0: [1], 1: [2]}, is_whole=False)
    assert agreement.is_same
