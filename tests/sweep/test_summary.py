import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from inferkit.config.schema import SloConfig
from inferkit.sweep.cells import JobResult
from inferkit.sweep.hydra_cells import objective_value
from inferkit.sweep.plan import PlannedCell
from inferkit.sweep.start import sum_up
from inferkit.sweep.summary import SUMMARY_FILE, Summary, csv_text, read_summary
from tests.config.configs import changed
from tests.sweep.sweeps import metrics, write_cell, write_grid

GOOD = {"finish_reason": "length", "ttft_s": 0.1, "tpot_s": 0.01, "e2e_s": 1.0}
LATE = {**GOOD, "ttft_s": 9.0}


def summarise(sweep_dir: Path) -> Summary:
    """Without the pictures, which take most of the time."""
    summary = read_summary(sweep_dir)
    (sweep_dir / SUMMARY_FILE).write_text(csv_text(summary), "utf-8")
    return summary


def shown(summary: Summary, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        summary.print(console)
    return capture.get()


def rows(sweep_dir: Path) -> list[dict[str, str]]:
    with (sweep_dir / SUMMARY_FILE).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_summary_counts_how_cells_ended(tmp_path: Path) -> None:
    write_grid(tmp_path)
    write_cell(tmp_path, 6, ("scheduler.batch_size=3", "parallel=tp2"), status="invalid")

    summary = summarise(tmp_path)

    assert (summary.num_ok, summary.num_failed, summary.num_invalid) == (5, 1, 1)
    text = shown(summary)
    assert "5 of 7 cells ended ok; 1 failed, 1 invalid (not run)" in text
    assert "#4 failed [scheduler.batch_size=64 parallel=tp1]: rank 0 was killed by SIGKILL" in text


def test_table_shows_what_varies_and_says_the_rest_once(tmp_path: Path) -> None:
    write_grid(tmp_path)

    text = shown(summarise(tmp_path))

    heading, table = text.split("\u250f", 1)
    assert "with model=llama platform=cpu" in heading
    assert "model" not in table.partition("* best")[0]
    assert "batch_size" in table
    assert "tp2" in table


def test_the_best_cell_is_marked(tmp_path: Path) -> None:
    write_grid(tmp_path)

    summary = summarise(tmp_path)

    assert summary.best is not None
    assert summary.best.number == 5
    text = shown(summary)
    assert "#5 *" in text
    assert "* best by output_tokens_per_s: #5 with 2599" in text


def test_the_best_by_a_time_is_the_shortest(tmp_path: Path) -> None:
    write_grid(tmp_path, sweep={"objective": "tpot_s.p50"})

    best = summarise(tmp_path).best

    assert best is not None
    assert best.number == 1


def test_an_objective_that_no_column_shows_gets_its_own(tmp_path: Path) -> None:
    sweep = {"objective": "peak_memory_bytes"}
    for number, size in enumerate((7, 5)):
        values = metrics(tokens_per_s=1.0, ttft_s=1.0, tpot_s=1.0, peak_memory_bytes=size)
        write_cell(tmp_path, number, (f"a.b={number}",), values=values, sweep=sweep)

    text = shown(summarise(tmp_path))

    assert "all cells: tokens/s 1, TTFT p50 ms 1000" in text
    assert "peak_memory_bytes \u2503" in text
    assert "* best by peak_memory_bytes: #1 with 5 [a.b=1]" in text


def test_with_limits_the_best_has_the_most_good_requests_per_second(tmp_path: Path) -> None:
    sweep = {"slo": {"ttft_s": 0.5, "tpot_s": None}, "objective": None}
    requests = {0: [GOOD] * 8, 1: [GOOD] * 2 + [LATE] * 6}
    for number, ended in requests.items():
        values = metrics(tokens_per_s=100.0 + number, ttft_s=0.1, tpot_s=0.01)
        write_cell(tmp_path, number, (f"a.b={number}",), values=values, sweep=sweep, requests=ended)

    summary = summarise(tmp_path)

    assert summary.objective == "goodput"
    assert summary.limits == {"ttft_s": 0.5}
    assert "a request is good with TTFT <= 500 ms\n" in shown(summary)
    assert summary.best is not None
    assert summary.best.number == 0
    assert [row["goodput"] for row in rows(tmp_path)] == ["2.0", "0.5"]
    assert [row["slo_attainment"] for row in rows(tmp_path)] == ["1.0", "0.25"]


def test_csv_has_a_column_for_each_swept_key_and_each_metric(tmp_path: Path) -> None:
    write_grid(tmp_path)

    summarise(tmp_path)

    found = rows(tmp_path)
    assert [row["cell"] for row in found] == ["0", "1", "2", "3", "4", "5"]
    assert found[3]["scheduler.batch_size"] == "8"
    assert found[3]["parallel"] == "tp2"
    assert float(found[3]["ttft_s.p99"]) == pytest.approx(2 * 0.2 / 8**0.5)
    assert float(found[3]["output_tokens_per_s_per_device"]) == pytest.approx(
        float(found[3]["output_tokens_per_s"]) / 2
    )
    assert (found[4]["status"], found[4]["ttft_s.p50"]) == ("failed", "")
    assert "SIGKILL" in found[4]["error"]
    assert not any(name.startswith("expert_load.layers") for name in found[0])


def test_a_cell_without_result_was_not_run(tmp_path: Path) -> None:
    write_grid(tmp_path)
    overrides = ["parallel=tp1", "scheduler.batch_size=2"]
    listed = [{"number": n, "folder": str(n), "overrides": overrides} for n in (0, 7)]
    record = {"sweep": {"objective": "ttft_s.p50"}, "cells": listed}
    (tmp_path / "sweep.json").write_text(json.dumps(record), "utf-8")

    summary = summarise(tmp_path)

    assert [(cell.number, cell.status) for cell in summary.cells] == [(0, "ok"), (7, "not run")]
    assert summary.num_failed == 1
    assert summary.objective == "ttft_s.p50"


def test_a_cell_whose_files_are_damaged_is_named(tmp_path: Path) -> None:
    write_grid(tmp_path)
    (tmp_path / "3" / "result.json").write_text('{"number": 3, ')
    (tmp_path / "1" / "config.resolved.yaml").write_text("a: [")

    summary = summarise(tmp_path)

    assert [cell.status for cell in summary.cells].count("damaged") == 2
    assert summary.num_failed == 3
    assert "its files cannot be read: Expecting property name" in shown(summary)


def test_goodput_is_what_a_search_is_told(tmp_path: Path) -> None:
    run_dir = write_cell(
        tmp_path,
        0,
        (),
        values=metrics(tokens_per_s=100.0, ttft_s=0.1, tpot_s=0.01),
        requests=[GOOD] * 6 + [LATE] * 2,
    )
    cell = PlannedCell(
        number=0, overrides=(), folder=run_dir, config=changed(sweep__slo=SloConfig(ttft_s=0.5))
    )
    result = JobResult(number=0, overrides=(), status="ok")

    assert objective_value(cell, result) == 6 / 4.0
    assert math.isnan(objective_value(cell, replace(result, status="failed")))
    without = replace(cell, config=changed(sweep__objective="ttft_s.p50"))
    assert objective_value(without, result) == 0.1


def test_limits_of_the_sweep_are_those_of_its_cells(tmp_path: Path) -> None:
    values = metrics(tokens_per_s=1.0, ttft_s=0.1, tpot_s=0.01)
    write_cell(tmp_path, 0, (), values=values, requests=[GOOD, LATE])
    listed = [{"number": 0, "folder": "0", "overrides": []}]
    record = {"sweep": {"slo": {"ttft_s": 0.5, "tpot_s": None}}, "cells": listed}
    (tmp_path / "sweep.json").write_text(json.dumps(record), "utf-8")

    (cell,) = summarise(tmp_path).cells

    assert cell.metrics["slo_attainment"] == 0.5


def test_one_cell(tmp_path: Path) -> None:
    values = metrics(tokens_per_s=123.0, ttft_s=0.5, tpot_s=0.01)
    write_cell(tmp_path, 0, ("parallel=tp2",), values=values, world_size=2)

    text = shown(summarise(tmp_path))

    assert text.startswith("sweep of 1 cell\nwith model=llama platform=cpu parallel=tp2\n")
    assert "1 of 1 cell ended ok" in text


def test_no_cell_at_all(tmp_path: Path) -> None:
    summary = summarise(tmp_path)

    assert (summary.num_ok, summary.num_failed, summary.best) == (0, 0, None)
    assert "0 of 0 cells ended ok" in shown(summary)


def test_markup_of_an_error_is_shown_as_it_is(tmp_path: Path) -> None:
    write_cell(tmp_path, 0, ("a.b=1",), status="failed", error="[bold]no[/] such [x]")

    assert "#0 failed: [bold]no[/] such [x]" in shown(summarise(tmp_path))


def test_a_table_in_a_file_keeps_its_lines_whole(tmp_path: Path) -> None:
    write_grid(tmp_path)

    lines = shown(summarise(tmp_path), width=40).splitlines()

    assert "seconds" in lines[4]
    assert "2599" in next(line for line in lines if "#5" in line)


def test_a_narrow_terminal_shows_the_columns_that_matter_most(tmp_path: Path) -> None:
    write_grid(tmp_path)
    console = Console(width=72, force_terminal=True, no_color=True)

    with console.capture() as capture:
        summarise(tmp_path).print(console)

    text = capture.get()
    assert "2599" in text
    assert "p50 ms" in text
    assert "p99 ms" not in text
    assert "columns do not fit this terminal" in text


def test_a_search_keeps_its_axes_where_all_trials_drew_one_value(tmp_path: Path) -> None:
    for number in range(2):
        values = metrics(tokens_per_s=100.0 + number, ttft_s=0.1, tpot_s=0.01)
        write_cell(tmp_path, number, ("scheduler.batch_size=4",), values=values)
    (tmp_path / "sweep.json").write_text(json.dumps({"axes": ["scheduler.batch_size"]}), "utf-8")

    text = shown(summarise(tmp_path))

    assert "batch_size" in text.partition("tokens/s")[0].partition("sweep of 2 cells")[2]
    assert "* best by output_tokens_per_s: #1 with 101 [scheduler.batch_size=4]" in text
    assert [row["scheduler.batch_size"] for row in rows(tmp_path)] == ["4", "4"]


@pytest.mark.parametrize(
    ("sizes", "axes", "objective", "best"),
    [
        ((1, 4), [], "goodput_per_device", 0),
        ((4, 4), [], "goodput", 1),
        ((1, 4), ["parallel"], "goodput", 1),  # what the search itself has looked for
    ],
)
def test_cells_of_several_sizes_are_compared_per_device(
    tmp_path: Path, sizes: tuple[int, int], axes: list[str], objective: str, best: int
) -> None:
    for number, (size, wall_time_s) in enumerate(zip(sizes, (4.0, 2.0), strict=True)):
        values = metrics(tokens_per_s=100.0, ttft_s=0.1, tpot_s=0.01, wall_time_s=wall_time_s)
        write_cell(
            tmp_path,
            number,
            (f"parallel=tp{size}", f"data.seed={number}"),
            values=values,
            world_size=size,
            sweep={"slo": {"ttft_s": 1.0}},
            requests=[GOOD] * 8,
        )
    (tmp_path / "sweep.json").write_text(json.dumps({"axes": axes}), "utf-8")

    summary = summarise(tmp_path)

    assert (summary.objective, summary.best.number if summary.best else None) == (objective, best)


def test_the_summary_of_no_cell_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sum_up(tmp_path) == 1

    assert f"no cell has been run in {tmp_path}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
