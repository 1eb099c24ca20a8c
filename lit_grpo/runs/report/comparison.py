"""Overlay runs to compare them: one colour a run, one panel for each quantity."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, cycle, product
from math import ceil
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.typing import LineStyleType

from lit_grpo.runs.report.curves import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    Panel,
    draw_line,
    finish_panel,
    open_picture,
)
from lit_grpo.runs.report.history import ACCURACY, Run

COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, "#0891b2", "#db2777", "#78716c")
LINE_STYLES: tuple[LineStyleType, ...] = ("-", "--", ":")
"""Styles after the first are for more runs than there are colours."""
FAINT = 0.08
"""Opacity of single steps; many runs' steps would hide the running means."""


def free_path_of_comparison(runs: Sequence[Run]) -> Path:
    """Return ``comparison-1.html`` (or 2, …) of the last run, which no page or picture uses yet."""
    numbered = (runs[-1].path / f"comparison-{number}.html" for number in count(1))
    return next(one for one in numbered if not (one.exists() or one.with_suffix(".png").exists()))


def draw_comparison(runs: Sequence[Run], path: Path) -> None:
    """Overlay runs in a picture.

    A run that started from another one of them begins at the step where that one ended.
    """
    looks = [look for look, _ in zip(cycle(product(LINE_STYLES, COLORS)), runs, strict=False)]
    with open_picture(path, runs) as (figure, panels):
        for panel, ax in panels:
            for run, (linestyle, color) in zip(runs, looks, strict=True):
                if panel.fits(run):
                    _draw_run(ax, panel, run, linestyle, color)
            finish_panel(ax, panel, runs)
        add_legend(figure, [describe(run) for run in runs], looks)


def add_legend(
    figure: Figure, names: Sequence[str], looks: Sequence[tuple[LineStyleType, str]]
) -> None:
    """Put one legend above all panels, in as many columns as there is room for."""
    inches = 0.7 + 0.09 * max(map(len, names))
    num_columns = max(1, int(figure.get_figwidth() / inches))
    figure.set_figheight(figure.get_figheight() + 0.24 * ceil(len(names) / num_columns))
    figure.legend(
        [Line2D([], [], linestyle=style, color=color, linewidth=2.5) for style, color in looks],
        names,
        loc="outside upper left",
        ncols=num_columns,
        fontsize=11,
    )


def _draw_run(ax: Axes, panel: Panel, run: Run, linestyle: LineStyleType, color: str) -> None:
    offset = panel.offset(run)
    if panel.metric == ACCURACY:  # of many prompts, so not noisy
        values = run.values(ACCURACY)
        steps = values.index + offset
        ax.plot(steps, values, linestyle=linestyle, marker=".", color=color, linewidth=1.6)
    else:
        draw_line(ax, run, offset, panel.metric, color, linestyle=linestyle, faint=FAINT)


def describe(run: Run) -> str:
    """Return the label of a run, with the label of the run that it started from."""
    source = run.started_from
    return run.label if source is None else f"{run.label} (started from {source.label})"
