from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.image import imread

from inferkit.sweep.outcomes import find_axes, read_outcomes
from inferkit.sweep.plot_pareto import pareto_front
from inferkit.sweep.plots import draw_pictures
from inferkit.sweep.summary import NO_PICTURES, summarise
from tests.sweep.sweeps import metrics, write_cell, write_grid

REQUESTS = [
    {"finish_reason": "length", "ttft_s": 0.1 * n, "tpot_s": 0.01, "e2e_s": 1.0}
    for n in range(1, 9)
]


def write(
    sweep_dir: Path, axes: Mapping[str, Sequence[Any]], *, slo: float | None = None, bad: int = -1
) -> None:
    for number, point in enumerate(product(*axes.values())):
        overrides = [f"{key}={value}" for key, value in zip(axes, point, strict=True)]
        values = metrics(tokens_per_s=10.0 + number, ttft_s=0.1, tpot_s=0.01 * (1 + number % 3))
        write_cell(
            sweep_dir,
            number,
            overrides,
            values=None if number == bad else values,
            status="failed" if number == bad else "ok",
            sweep={"slo": {"ttft_s": slo}} if slo else {},
            requests=REQUESTS if slo else (),
        )


def lines_of(
    sweep_dir: Path, monkeypatch: pytest.MonkeyPatch, *, limits: Mapping[str, float] | None = None
) -> list[tuple[list[float], list[float], dict[str, Any]]]:
    """x, y and style of all lines, in the order in which they are drawn."""
    drawn: list[tuple[list[float], list[float], dict[str, Any]]] = []
    plot = Axes.plot

    def record(self: Axes, xs: Any, ys: Any, *words: Any, **style: Any) -> Any:
        drawn.append((list(xs), list(ys), style))
        return plot(self, xs, ys, *words, **style)

    monkeypatch.setattr(Axes, "plot", record)
    cells = read_outcomes(sweep_dir)
    draw_pictures(
        cells, find_axes(cells), objective="goodput", limits=limits or {}, folder=sweep_dir
    )
    return drawn


def pictures(sweep_dir: Path) -> list[str]:
    summary = summarise(sweep_dir)
    for path in summary.pictures:
        height, width, _ = imread(path).shape
        assert min(height, width) > 400
    return [path.name for path in summary.pictures]


AXES: tuple[dict[str, Sequence[Any]], ...] = (
    {"scheduler.batch_size": (1, 2, 4, 8)},
    {"model": ("qwen3_8b", "llama"), "parallel": ("tp1", "tp2", "dp2")},
    {"scheduler.batch_size": (1, 8, 64), "parallel": [f"tp{size}" for size in range(1, 10)]},
    {"a.b": (1, 2, 3), "c.d": ("x", "y"), "e.f": (True, False), "g.h": ("$1", "$2")},
    {"cluster.prefill_overrides": ("parallel=tp2 scheduler.batch_size=8", "parallel=tp1 a.b=c")},
)


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "-".join(axes))
def test_any_axes_give_throughput_latency_and_pareto(
    tmp_path: Path, axes: dict[str, Sequence[Any]]
) -> None:
    write(tmp_path, axes, bad=0)

    expected = ["throughput_latency.png", "pareto.png"]
    num_cells = len(list(product(*axes.values())))
    assert pictures(tmp_path) == (expected if num_cells > 2 else expected[:1])


def test_limits_give_a_goodput_curve(tmp_path: Path) -> None:
    write(tmp_path, {"load.rate": (1, 2, 4), "parallel": ("tp1", "tp2")}, slo=0.35)

    assert pictures(tmp_path)[2:] == ["goodput.png", "slo_scale.png"]


def test_the_offered_rate_is_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, rate in enumerate((1, 4)):
        values = metrics(tokens_per_s=10.0, ttft_s=0.1, tpot_s=0.01)
        sent = [{**one, "sent_s": place / 5 / rate} for place, one in enumerate(REQUESTS)]
        slo = {"slo": {"ttft_s": 9.0}}
        folder = write_cell(
            tmp_path, number, (f"load.rate={rate}",), values=values, sweep=slo, requests=sent
        )
        config = yaml.safe_dump({"load": {"rate": rate}, "sweep": slo})
        (folder / "config.resolved.yaml").write_text(config, "utf-8")
    drawn = lines_of(tmp_path, monkeypatch, limits={"ttft_s": 9.0})

    (offered,) = [(xs, ys) for xs, ys, style in drawn if style.get("linestyle") == "--" and xs]
    assert offered[0] == [1.0, 4.0]
    assert offered[1] == pytest.approx([8 * 5 / 7, 8 * 4 * 5 / 7])


def test_one_cell_has_no_axis_to_draw_over(tmp_path: Path) -> None:
    write(tmp_path, {"scheduler.batch_size": (1,)}, slo=0.35)

    assert pictures(tmp_path) == ["slo_scale.png"]


def test_no_picture_without_a_result(tmp_path: Path) -> None:
    write(tmp_path, {"scheduler.batch_size": (1,)}, bad=0)
    write_cell(tmp_path, 1, ("scheduler.batch_size=2",), status="timeout")

    assert pictures(tmp_path) == []


def test_pictures_of_an_earlier_summary_go(tmp_path: Path) -> None:
    write_grid(tmp_path)
    (tmp_path / "goodput.png").write_bytes(b"old")

    assert "goodput.png" not in pictures(tmp_path)
    assert not (tmp_path / "goodput.png").exists()


def test_a_line_has_a_gap_and_a_cross_where_a_cell_has_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"scheduler.batch_size": (1, 2, 4)}, bad=1)

    drawn = lines_of(tmp_path, monkeypatch)

    _, tokens, style = drawn[0]
    assert (tokens[0], tokens[2], style["marker"]) == (10.0, 12.0, "o")
    assert tokens[1] != tokens[1]
    assert "x" in [style.get("marker") for _, _, style in drawn]


def test_without_matplotlib_the_summary_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import builtins

    write_grid(tmp_path)
    real_import = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name == "inferkit.sweep.plots":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    summary = summarise(tmp_path)

    assert (summary.pictures, summary.note) == ((), NO_PICTURES)


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([(1.0, 10.0)], [0]),
        ([(1.0, 10.0), (2.0, 20.0), (3.0, 15.0)], [0, 1]),
        ([(2.0, 20.0), (1.0, 20.0)], [1]),
        ([(1.0, 10.0), (1.0, 12.0)], [1]),
        ([(3.0, 3.0), (2.0, 2.0), (1.0, 1.0)], [2, 1, 0]),
    ],
)
def test_the_front_has_the_cells_that_no_other_beats(
    points: list[tuple[float, float]], front: list[int]
) -> None:
    assert pareto_front(points) == front
