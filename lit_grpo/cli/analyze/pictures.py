"""Draw rows with scores by their source: spreads, pass rates, lengths and balance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_grpo.cli.analyze.measures import NUM_BINS
from lit_grpo.cli.analyze.scored_rows import ScoredRow, ScoredRows
from lit_grpo.runs.report.curves import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    STYLE,
    save_picture,
)

COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED)

Values = Mapping[str, Sequence[float]]
"""Source -> the values of its rows."""


def draw_rows(found: ScoredRows, threshold: float, unit: str, path: Path) -> Figure:
    """Write a picture of rows; the suffix, such as ``.png``, sets its type.

    Args:
        found: The rows.
        threshold: The difference of scores that counts as signal, which gets a line.
        unit: Unit of the lengths.
        path: File of the picture, whose directory must exist.

    Raises:
        ValueError: there is no such type of pictures.
    """
    panels: list[tuple[str, Values, float | None]] = [
        (
            "Best score minus worst, of rows",
            _by_source(found, lambda row: [] if row.spread is None else [row.spread]),
            threshold,
        ),
        (
            "Pass rates, of rows",
            _by_source(found, lambda row: [] if row.pass_rate is None else [row.pass_rate]),
            None,
        ),
        (
            f"Lengths of prompts ({unit})",
            _by_source(found, lambda row: [] if row.prompt_length is None else [row.prompt_length]),
            None,
        ),
        (
            f"Lengths of answers ({'tokens' if found.kind == 'run' else unit})",
            _by_source(found, lambda row: row.answer_lengths),
            None,
        ),
    ]
    drawn = [panel for panel in panels if any(panel[1].values())]
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(4.4 * (len(drawn) + 1), 3.3), layout="constrained")
        axes = list(figure.subplots(1, len(drawn) + 1, squeeze=False).flat)
        for (title, values, mark), ax in zip(drawn, axes, strict=False):
            ax.set_title(title)
            _draw_histogram(ax, values)
            if mark:
                ax.axvline(mark, color=GREY, linestyle=":")
        _draw_balance(axes[-1], found)
        save_picture(figure, path)
    return figure


def _by_source(found: ScoredRows, values_of: Callable[[ScoredRow], Sequence[float]]) -> Values:
    values: dict[str, list[float]] = {name: [] for name in _sources(found)}
    for row in found.rows:
        values[row.source].extend(values_of(row))
    return values


def _sources(found: ScoredRows) -> list[str]:
    return sorted({row.source for row in found.rows})


def _draw_histogram(ax: Axes, values: Values) -> None:
    """Stack the sources in bins from 0 to the highest value, at least 1."""
    top = max(1.0, *(value for some in values.values() for value in some))
    colors = [COLORS[number % len(COLORS)] for number in range(len(values))]
    ax.hist(
        [list(some) for some in values.values()],
        bins=NUM_BINS,
        range=(0, top),
        stacked=True,
        color=colors,
        label=list(values),
    )
    ax.grid(axis="x", visible=False)
    if len(values) > 1:
        ax.legend()


def _draw_balance(ax: Axes, found: ScoredRows) -> None:
    """Draw how many rows each source has, and by a line how many it would have by its weight."""
    names = _sources(found)
    counts = [sum(row.source == name for row in found.rows) for name in names]
    labels = [name or "all" for name in names]
    colors = [COLORS[number % len(COLORS)] for number in range(len(names))]
    bars = ax.barh(labels, counts, color=colors)
    ax.bar_label(bars, [f"{count:,}" for count in counts], padding=3, fontsize=8)
    title = "Rows by source"
    for number, name in enumerate(names):
        if share := found.shares.get(name):
            by_weight = share * sum(counts)
            ax.plot([by_weight] * 2, [number - 0.4, number + 0.4], color=INK, linewidth=2)
            title = "Rows by source (line: by weight)"
    ax.set_title(title)
    ax.margins(x=0.15)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
