"""The charts of the page, as traces that Plotly draws; the page's script adds the layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from lit_grpo.runs.report.curves import (
    LENGTH,
    MAX_PLAIN_POINTS,
    NATS,
    SPEED,
    STEP_PHASES,
    STEP_TIME,
)
from lit_grpo.runs.report.held_out import title_of
from lit_grpo.runs.report.history import ACCURACY, Run

Trace = dict[str, Any]

COLORS = (
    "#3b82f6", "#e08700", "#10a36f", "#e5484d", "#8b5cf6", "#0ea5b7", "#e0559b", "#8d8780",
)  # fmt: skip
"""Readable on white and on black."""
DASHES = ("solid", "dash", "dot")
"""Styles after the first are for more runs than there are colours."""
GREY = COLORS[-1]
MAX_POINTS = 1000
"""A longer curve is drawn as the means of consecutive steps, to keep the page small."""
BAND_OPACITY = "22"
UNSEEN: Trace = {"hoverinfo": "skip", "hovertemplate": None}
"""Settings of a trace that shows no values at the pointer; a template would override them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One quantity over the steps of the runs that have it."""

    title: str
    metric: str
    """A run without this metric is not in the chart. It is the only line of compared runs."""
    name: str = ""
    """Name of its line, if there are others."""
    others: str = ""
    """Pattern of the metrics of further lines; its group is the name of the line."""
    unit: str = ""
    color: int = 0
    band: Callable[[Run], tuple[pd.Series, pd.Series]] | None = None
    """Returns the limits of an area around the line."""
    is_stacked: bool = False
    """Whether the metric is the sum of `STEP_PHASES`, which are drawn."""
    has_points: bool = False
    """Whether each value is marked: for what is not measured at every step."""
    shows_zeros: bool = True
    """Whether a run whose values are all 0 is drawn."""

    def fits(self, run: Run) -> bool:
        return run.has(self.metric) and (self.shows_zeros or bool(run.values(self.metric).any()))

    def offset(self, run: Run) -> int:
        """Return the number of steps of the earlier stages that are in the chart."""
        return sum(stage.num_steps for stage in self._before(run))

    def seconds_before(self, run: Run) -> float:
        """Return the time that these stages took."""
        return sum(stage.seconds for stage in self._before(run))

    def _before(self, run: Run) -> list[Run]:
        return [stage for stage in run.stages[:-1] if self.fits(stage)]

    def lines(self, run: Run) -> dict[str, str]:
        """Return metric -> name of the lines of a run."""
        found = {self.metric: self.name}
        for metric in map(str, run.metrics if self.others else ()):
            match = re.fullmatch(self.others, metric)
            if match and run.has(metric):
                found.setdefault(metric, match[1].replace("_", " "))
        return found


def draw_charts(runs: Sequence[Run], *, is_comparison: bool) -> list[dict[str, Any]]:
    """Return the charts that fit one of the runs.

    Each has a title, a unit, traces over steps, and by run the steps and the seconds before it.
    """
    return [
        _draw(chart, runs, is_comparison)
        for chart in (*CHARTS[:2], *_parts(runs, is_comparison), *CHARTS[2:])
        if any(map(chart.fits, runs))
    ]


def _parts(runs: Sequence[Run], is_comparison: bool) -> list[Chart]:
    """Return the charts of single rewards and sources, one for each of them in a comparison."""
    sources = dict.fromkeys(source for run in runs for source in run.sources)
    found = (re.fullmatch(r"reward/(.+)/mean", str(name)) for run in runs for name in run.metrics)
    names = dict.fromkeys(match[1] for match in found if match and match[1] not in sources)
    if is_comparison:
        titles = [f"Reward {name}" for name in names] if len(names) > 1 else []
        titles += [f"Reward of {source}" for source in sources]
        of = [*(names if len(names) > 1 else ()), *sources]
        return [
            Chart(title=title, metric=f"reward/{name}/mean")
            for title, name in zip(titles, of, strict=True)
        ]
    kinds = [("Individual rewards, unweighted", "reward/{}/mean", "", names)]
    kinds += [(title, metric, unit, sources) for title, metric, unit in BY_SOURCE]
    charts = []
    for title, metric, unit, named in kinds:
        there = [one for one in named if any(run.has(metric.format(one)) for run in runs)]
        if len(there) > 1:
            charts.append(_together(title, there, metric, unit))
    return charts


def _together(title: str, names: Sequence[str], metric: str, unit: str) -> Chart:
    """Return a chart with a line for each name."""
    first, *others = names
    pattern = metric.format(f"({'|'.join(map(re.escape, others))})")
    return Chart(title=title, metric=metric.format(first), name=first, others=pattern, unit=unit)


def _draw(chart: Chart, runs: Sequence[Run], is_comparison: bool) -> dict[str, Any]:
    fitting = {number: run for number, run in enumerate(runs) if chart.fits(run)}
    traces: list[Trace] = []
    for number, run in fitting.items():
        if is_comparison:
            dash = DASHES[number // len(COLORS) % len(DASHES)]
            drawn = _line(chart, run, chart.metric, run.label, COLORS[number % len(COLORS)], dash)
        else:
            drawn = list(_stacked(chart, run) if chart.is_stacked else _lines(chart, run))
        traces += [trace | {"meta": number, "legendgroup": trace["name"]} for trace in drawn]
    named: set[str] = set()
    for trace in traces:
        shown = trace.get("showlegend", True) and trace["name"] not in named
        trace["showlegend"] = bool(shown and trace["name"] and not is_comparison)
        named |= {trace["name"]} if shown else set()
    return {
        "title": title_of(chart.title, chart.metric, runs),
        "unit": chart.unit,
        "metric": chart.metric,
        "traces": traces,
        "offsets": {number: chart.offset(run) for number, run in fitting.items()},
        "secondsBefore": {number: chart.seconds_before(run) for number, run in fitting.items()},
    }


def _lines(chart: Chart, run: Run) -> Iterator[Trace]:
    """Yield the band and all lines of a run."""
    found = chart.lines(run)
    if chart.band is not None:
        yield from _band(*chart.band(run), chart.offset(run), COLORS[chart.color])
    for number, (metric, name) in enumerate(found.items()):
        color = COLORS[(chart.color + number) % len(COLORS)]
        shown = name if len(found) > 1 or chart.band is not None else ""
        yield from _line(chart, run, metric, shown, color)


def _line(
    chart: Chart, run: Run, metric: str, name: str, color: str, dash: str = "solid"
) -> list[Trace]:
    """Return a curve; a long one is faint, with a running mean in front of it."""
    values = thin(run.values(metric))
    is_dotted = chart.has_points or len(values) == 1
    curve = _curve(values, chart.offset(run), name) | {
        "mode": "lines+markers" if is_dotted else "lines",
        "line": {"color": color, "width": 2, "dash": dash},
        "marker": {"size": 5},
    }
    if len(values) <= MAX_PLAIN_POINTS or is_dotted:
        return [curve]
    mean = values.rolling(max(5, len(values) // 30), min_periods=1, center=True).mean()
    smooth = curve | _curve(mean, chart.offset(run), name) | UNSEEN
    faint = {"opacity": 0.25, "line": {"color": color, "width": 1}, "showlegend": False}
    return [curve | faint, smooth]


def _band(low: pd.Series, high: pd.Series, offset: int, color: str) -> Iterator[Trace]:
    plain = {"line": {"width": 0}, "showlegend": False, "mode": "lines"} | UNSEEN
    low, high = low.align(high, join="inner")
    yield _curve(thin(low), offset, "") | plain
    fill = {"fill": "tonexty", "fillcolor": f"{color}{BAND_OPACITY}"}
    yield _curve(thin(high), offset, "") | plain | fill


def _stacked(chart: Chart, run: Run) -> Iterator[Trace]:
    """Yield the phases of a step on top of each other, and what is left of it."""
    total = run.values(chart.metric)
    metrics = {phase: f"timing/{phase}_duration_s" for phase in STEP_PHASES}
    parts = {
        STEP_PHASES[phase][0]: run.values(metric).reindex(total.index, fill_value=0)
        for phase, metric in metrics.items()
        if run.has(metric)
    }
    parts = {name: part for name, part in parts.items() if part.sum() > 0.005 * total.sum()}
    names = [name for name, _ in STEP_PHASES.values()]
    for name, part in (parts | {"other": (total - sum(parts.values())).clip(lower=0)}).items():
        color = COLORS[names.index(name)] if name in names else GREY
        yield _curve(thin(part), chart.offset(run), name) | {
            "mode": "lines",
            "line": {"width": 0, "color": color},
            "fillcolor": f"{color}b0",
            "stackgroup": run.label,
        }


def _curve(values: pd.Series, offset: int, name: str) -> Trace:
    return {
        "type": "scatter",
        "x": [int(step) + offset for step in values.index],
        "y": [float(f"{value:.5g}") if np.isfinite(value) else None for value in values],
        "name": escape(name),
        "hovertemplate": "%{y:.4g}" if name else "%{y:.4g}<extra></extra>",
    }


def thin(values: pd.Series) -> pd.Series:
    """Return at most `MAX_POINTS` values: means of consecutive ones, at the last step of each."""
    size = -(-len(values) // MAX_POINTS)
    if size <= 1:
        return values
    groups = np.arange(len(values)) // size
    means = values.groupby(groups).mean()
    means.index = pd.Series(values.index).groupby(groups).last()
    return means


def draw_clock(run: Run) -> dict[str, list[float]]:
    """Return at most about `MAX_POINTS` steps of a run, from 0, and the seconds until each."""
    clock = run.clock
    places = range(len(clock) - 1, -1, -max(1, -(-len(clock) // MAX_POINTS)))
    chosen = clock.iloc[[*reversed(places)]]
    return {
        "steps": [0, *map(int, chosen.index)],
        "seconds": [0.0, *(round(float(one), 3) for one in chosen)],
    }


def reward_band(run: Run) -> tuple[pd.Series, pd.Series]:
    """Return the mean minus and plus the deviation within groups."""
    mean = run.values("reward/mean")
    deviation = run.values("reward/std").reindex(mean.index) if run.has("reward/std") else 0 * mean
    return (mean - deviation).dropna(), (mean + deviation).dropna()


def length_band(run: Run) -> tuple[pd.Series, pd.Series]:
    """Return the lengths of the shortest and the longest completions."""
    low, high = (
        f"completions/{end}_length" if run.has(f"completions/{end}_length") else LENGTH
        for end in ("min", "max")
    )
    return run.values(low), run.values(high)


BY_SOURCE = (
    ("Reward by source", "reward/{}/mean", ""),
    ("Groups without a signal by source", "reward/{}/frac_zero_std", "share"),
    ("Completion length by source", "completions/{}/mean_length", "tokens"),
    ("Held-out accuracy by source", "val/{}/accuracy", "share"),
    ("Prompts by source", "data/{}/share", "share"),
)
"""Title, metric and unit of the charts of a run with several sources."""

CHARTS = (
    Chart(
        title="Held-out accuracy",
        metric=ACCURACY,
        name="greedy",
        others=r"val/((?:avg|pass)@.+)",
        has_points=True,
    ),
    Chart(title="Reward", metric="reward/mean", name="mean ± in-group deviation", band=reward_band),
    Chart(title="In-group deviation of the reward", metric="reward/std", color=4),
    Chart(title="Groups without a signal", metric="reward/frac_zero_std", unit="share", color=3),
    Chart(
        title="Completion length",
        metric=LENGTH,
        name="mean, shortest to longest",
        unit="tokens",
        color=2,
        band=length_band,
    ),
    Chart(
        title="Truncated completions",
        metric="completions/truncated_fraction",
        unit="share",
        color=1,
        shows_zeros=False,
    ),
    Chart(title="SFT loss", metric="sft/loss", unit=NATS),
    Chart(title="Policy loss", metric="policy/loss"),
    Chart(title="KL to the reference", metric="policy/kl", unit=NATS, shows_zeros=False),
    Chart(title="Divergence from the teacher", metric="policy/distillation_kl", unit=NATS),
    Chart(title="Entropy", metric="policy/entropy", unit=NATS, color=2),
    Chart(title="Entropy on the targets", metric="sft/entropy", unit=NATS, color=2),
    Chart(title="Gradient norm", metric="policy/grad_norm", color=4),
    Chart(title="Time per step", metric=STEP_TIME, unit="seconds", is_stacked=True),
    Chart(title="Throughput", metric="perf/tokens_per_second", unit=SPEED, color=2),
    Chart(
        title="Memory",
        metric="perf/memory_allocated_gb",
        name="allocated",
        others="perf/memory_(reserved)_gb",
        unit="GiB",
    ),
)
