"""What is left of the results of a run, whole or not."""

import json
from pathlib import Path

from inferkit.offline.generations import (
    keep_finished,
    open_part,
    part_path,
    remove_generations,
    write_generations,
)
from inferkit.offline.result import GenerationResult
from tests.offline.finished_requests import make_request


def make_result(request_id: int, text: str) -> GenerationResult:
    return GenerationResult.from_request(make_request(request_id), "Why?", text)


def written(run_dir: Path) -> list[tuple[int, str]]:
    lines = (run_dir / "generations.jsonl").read_text("utf-8").splitlines()
    return [(json.loads(line)["request_id"], json.loads(line)["text"]) for line in lines]


def add(run_dir: Path, rank: int, *results: GenerationResult) -> None:
    with open_part(part_path(run_dir, rank)) as keep:
        for result in results:
            keep(result)


def test_parts_become_one_file_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    add(tmp_path, 0, make_result(4, "e"), make_result(0, "a\u2028\u00e9"))
    add(tmp_path, 2, make_result(1, "b"))
    assert keep_finished(tmp_path) == 3
    lines = (tmp_path / "generations.jsonl").read_text("utf-8").split("\n")
    assert lines[0] == make_result(0, "a\u2028\u00e9").to_json()
    assert [json.loads(line)["request_id"] for line in lines[:-1]] == [0, 1, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["generations.jsonl"]


def test_a_result_is_on_disk_before_the_part_is_closed(tmp_path: Path) -> None:
    with open_part(part_path(tmp_path, 0)) as keep:
        keep(make_result(0, "a"))
        assert part_path(tmp_path, 0).read_text("utf-8") == make_result(0, "a").to_json() + "\n"


def test_a_line_that_a_killed_rank_has_not_ended_is_left_out(tmp_path: Path) -> None:
    add(tmp_path, 0, make_result(0, "a"))
    with part_path(tmp_path, 0).open("ab") as file:
        file.write(b'{"request_id": 1, "text": "\xc3')
    assert keep_finished(tmp_path) == 1
    assert written(tmp_path) == [(0, "a")]


def test_a_complete_file_stays(tmp_path: Path) -> None:
    write_generations(tmp_path, [make_result(0, "a"), make_result(1, "b")])
    add(tmp_path, 0, make_result(0, "a"))
    assert keep_finished(tmp_path) is None
    assert written(tmp_path) == [(0, "a"), (1, "b")]
    assert keep_finished(tmp_path) is None
    assert not part_path(tmp_path, 0).exists()


def test_what_an_earlier_run_has_left_is_removed(tmp_path: Path) -> None:
    write_generations(tmp_path, [make_result(0, "a")])
    add(tmp_path, 3, make_result(0, "a"))
    remove_generations(tmp_path)
    assert list(tmp_path.iterdir()) == []
    remove_generations(tmp_path / "absent")
