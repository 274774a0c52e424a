"""The picture that a choice is made by: throughput of a device against time per output token."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from inferkit.config.sweep_rules import TOKENS_PER_S_PER_DEVICE
from inferkit.sweep.outcomes import Axis, Outcome
from inferkit.sweep.plot_plan import SEPARATOR, cell_label, plan_of
from inferkit.sweep.plot_style import (
    GREY,
    line_style,
    log_scale,
    new_figure,
    number_text,
    save,
    series_legend,
)

TPOT = "tpot_s.p50"
MAX_LABELS = 16
"""Of more cells only those of the front are named."""
MAX_LABEL_LEN = 32
LOG_RATIO = 20.0
MARK_SIZE = 5.0
DISTANCE = 7.0
"""Points between a mark and its label."""
SIDES = (
    ("right", "bottom", -1, 1),
    ("left", "top", 1, -1),
    ("left", "bottom", 1, 1),
    ("right", "top", -1, -1),
    ("left", "center", 1.4, 0),
    ("right", "center", -1.4, 0),
    ("center", "bottom", 0, 1.4),
    ("center", "top", 0, -1.4),
    ("right", "bottom", -1, 2.8),
    ("left", "top", 1, -2.8),
)
"""Where a label may stand, best first: alignments, and direction from the mark. Up and left
of the front there is nothing else."""


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (time, throughput) that no other beats in both, by rising time."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    front: list[int] = []
    for index in order:
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def plot_pareto(cells: Sequence[Outcome], axes: Sequence[Axis], path: Path) -> bool:
    """Draw all cells, the front, and what its cells are; False without two cells to compare."""
    known = [
        (cell, tpot_s * 1e3, tokens)
        for cell in cells
        if (tpot_s := cell.number_of(TPOT)) is not None
        and (tokens := cell.number_of(TOKENS_PER_S_PER_DEVICE)) is not None
    ]
    plan = plan_of(cells, axes)
    if plan is None or len(known) < 2:
        return False
    points = [(tpot_ms, tokens) for _, tpot_ms, tokens in known]
    front = pareto_front(points)
    figure = new_figure(9.0, 5.6)
    panel = figure.subplots()
    _scale(panel, points)
    stairs = _draw_front(panel, [points[index] for index in front])
    for index, (cell, tpot_ms, tokens) in enumerate(known):
        style = line_style(plan.labels.index(plan.series[cell.number])) | {"linestyle": "none"}
        is_best = index in front
        edge = {"markeredgecolor": "black", "markersize": 9} if is_best else {"alpha": 0.55}
        panel.plot([tpot_ms], [tokens], **style | edge, zorder=3 if is_best else 2)
    has_devices = any(cell.num_devices > 1 for cell in cells)
    panel.set_xlabel("TPOT p50, ms (less is better)")
    of_device = " per device" if has_devices else ""
    panel.set_ylabel(f"output tokens/s{of_device} (more is better)")
    panel.grid(alpha=0.3)
    panel.set_axisbelow(True)
    figure.suptitle("Throughput against time per output token")
    panel.set_title(
        f"labels: {SEPARATOR.join(axis.name for axis in axes)}", fontsize="small", color=GREY
    )
    keys = [
        Line2D([], [], color=GREY, linewidth=1.5, label="front: no cell is better in both"),
    ]
    series_legend(figure, plan, keys, has_lines=False)
    named = range(len(known)) if len(known) <= MAX_LABELS else front
    order = [*front, *(index for index in named if index not in front)]
    texts = [(*points[index], _name(known[index][0], axes)) for index in order]
    _place_labels(figure, panel, texts, points, stairs)
    save(figure, path)
    return True


def _scale(panel: Axes, points: Sequence[tuple[float, float]]) -> None:
    for axis, values in (
        (panel.xaxis, [x for x, _ in points]),
        (panel.yaxis, [y for _, y in points]),
    ):
        low, high = min(values), max(values)
        is_x = axis is panel.xaxis
        if 0 < LOG_RATIO * low < high:
            log_scale(panel, "x" if is_x else "y")
            limits = low / 1.5, high * 1.5
        else:
            axis.set_major_locator(MaxNLocator(8))
            axis.set_major_formatter(FuncFormatter(number_text))
            limits = 0.0, high * 1.12 or 1.0
        panel.set(**{"xlim" if is_x else "ylim": limits})


def _name(cell: Outcome, axes: Sequence[Axis]) -> str:
    """Its values, or its number where they are too long to stand beside a mark."""
    label = cell_label(cell, axes)
    return label if len(label) <= MAX_LABEL_LEN else f"#{cell.number}"


def _draw_front(
    panel: Axes, front: Sequence[tuple[float, float]]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Stairs: what is right of and below them, a cell of the front beats; returns the steps."""
    (_, right), (bottom, _) = panel.get_xlim(), panel.get_ylim()
    corners = [(front[0][0], bottom), front[0]]
    for x, y in front[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    corners.append((right, front[-1][1]))
    xs, ys = [x for x, _ in corners], [y for _, y in corners]
    panel.plot(xs, ys, color=GREY, linewidth=1.5, zorder=1)
    panel.fill_between(xs, ys, bottom, color=GREY, alpha=0.07, zorder=0)
    return list(pairwise(corners))


def _place_labels(
    figure: Figure,
    panel: Axes,
    texts: Sequence[tuple[float, float, str]],
    points: Sequence[tuple[float, float]],
    stairs: Sequence[tuple[tuple[float, float], tuple[float, float]]],
) -> None:
    """Write each label where it hides no mark and no other label, if it can be off the stairs.

    The first have first choice; one without a place is left out.
    """
    figure.draw_without_rendering()  # places the panel
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    to_pixels = panel.transData.transform
    frame = panel.get_window_extent(renderer)
    size = MARK_SIZE * figure.dpi / 72
    taken = [Bbox([[x - size, y - size], [x + size, y + size]]) for x, y in to_pixels(points)]
    steps = [Bbox(to_pixels(step)).padded(1.0) for step in stairs]

    def has_place(box: Bbox, others: Sequence[Bbox]) -> bool:
        is_inside = frame.containsx(box.x0) and frame.containsx(box.x1)
        is_inside &= frame.containsy(box.y0) and frame.containsy(box.y1)
        return bool(is_inside) and not any(box.overlaps(other) for other in others)

    for x, y, text in texts:
        for horizontal, vertical, right, up, avoided in (
            *((*side, [*taken, *steps]) for side in SIDES),
            *((*side, taken) for side in SIDES),
        ):
            label = panel.annotate(
                text,
                (x, y),
                xytext=(right * DISTANCE, up * DISTANCE),
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize="small",
            )
            box = label.get_window_extent(renderer)
            if has_place(box, avoided):
                taken.append(box)
                break
            label.remove()
