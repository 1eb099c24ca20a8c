"""Draw the curves of one training: one picture with a panel for each quantity that has data.

A training may have several stages, such as an SFT run and the GRPO run that started from it. The
charts of a report's page are in `page/charts.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from math import ceil
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import LineStyleType

from lit_grpo.runs.report.held_out import title_of
from lit_grpo.runs.report.history import ACCURACY, Run
from lit_grpo.types.atomic import replacing_file

LENGTH = "completions/mean_length"
CURRICULUM_PHASE = "curriculum/phase"
STEP_TIME = "timing/step_duration_s"
NATS = "nats per token"
SPEED = "completion tokens per second"

INK, FAINT, GREY = "#1f2937", "#e5e7eb", "#9ca3af"
BLUE, ORANGE, GREEN, RED, PURPLE = "#2563eb", "#f59e0b", "#059669", "#dc2626", "#7c3aed"
STYLE = {
    "figure.facecolor": "white",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10.5,
    "axes.titlepad": 16,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.color": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.75,
    "legend.fontsize": 8,
}
COLUMNS = 3
MAX_PLAIN_POINTS = 60
"""A curve with more points than this gets a running mean."""

STEP_PHASES = {
    "generation": ("generation", BLUE),
    "reward_exposed": ("waiting for rewards", ORANGE),
    "logprob": ("logprobs", GREEN),
    "update": ("update", PURPLE),
    "weight_sync": ("weight sync", RED),
}


def draw_curves(runs: Sequence[Run], path: Path) -> None:
    """Draw the stages of one training one after another."""
    with open_picture(path, runs) as (figure, panels):
        title = "  →  ".join(run.label for run in runs)
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, color=INK)
        for panel, ax in panels:
            draw_panel(ax, panel, runs)


@contextmanager
def open_picture(
    path: Path, runs: Sequence[Run]
) -> Iterator[tuple[Figure, list[tuple[Panel, Axes]]]]:
    """Yield a figure with axes for every panel that one of the runs fits, and write it."""
    panels = [panel for panel in PANELS if any(map(panel.fits, runs))]
    num_columns = min(COLUMNS, len(panels)) or 1
    num_rows = ceil(len(panels) / num_columns) or 1
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(
            figsize=(4.4 * num_columns, 2.7 * num_rows + 0.6),
            layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1),
        )
        axes = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
        for ax in axes[len(panels) :]:
            ax.remove()
        yield figure, list(zip(panels, axes, strict=False))
        for ax in axes[max(0, len(panels) - num_columns) : len(panels)]:
            ax.set_xlabel("step")
        save_picture(figure, path)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure whole or not at all; a name in it may have emojis, which the font lacks."""
    with warnings.catch_warnings(), replacing_file(path) as partial:
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from")
        figure.savefig(partial, dpi=150, format=path.suffix.removeprefix("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One quantity over the steps of the runs that have it."""

    title: str
    metric: str
    """A run without this metric is not in the panel."""
    unit: str = ""
    color: str = BLUE
    draw: Callable[[Axes, Run, int], None] | None = None
    """Draws one run, with its steps offset by earlier runs' steps; by default one curve."""
    shows_zeros: bool = True
    """Whether a run whose values are all 0 is drawn."""
    is_by_source: bool = False
    """Whether only runs with several sources are drawn."""

    def fits(self, run: Run) -> bool:
        if self.is_by_source and len(run.sources) < 2:
            return False
        return run.has(self.metric) and (self.shows_zeros or bool(run.values(self.metric).any()))

    def offset(self, run: Run) -> int:
        """Return the number of steps of the earlier stages that are in the panel."""
        return sum(stage.num_steps for stage in run.stages[:-1] if self.fits(stage))


def draw_panel(ax: Axes, panel: Panel, all_runs: Sequence[Run]) -> None:
    runs = [run for run in all_runs if panel.fits(run)]
    for run in runs:
        if panel.draw is not None:
            panel.draw(ax, run, panel.offset(run))
        else:
            draw_line(ax, run, panel.offset(run), panel.metric, panel.color)
        mark_phases(ax, run, panel.offset(run))
    finish_panel(ax, panel, runs)
    if len(runs) > 1:
        label_runs(ax, runs, list(map(panel.offset, runs)))
    handles, labels = ax.get_legend_handles_labels()
    if labels:
        unique = dict(zip(labels, handles, strict=True))
        num_columns = 1 if len(unique) < 4 else 2
        ax.legend(unique.values(), unique.keys(), handlelength=1.2, ncols=num_columns)


def finish_panel(ax: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    """Set the limits and titles of axes whose curves are drawn."""
    if panel.metric == ACCURACY:
        ax.set_ylim(0, 1.1)
    elif ax.dataLim.y0 >= 0:
        ax.set_ylim(bottom=0)
    ax.set_title(title_of(panel.title, panel.metric, runs))
    ax.set_ylabel(panel.unit)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def mark_phases(ax: Axes, run: Run, offset: int) -> None:
    """Mark where a phase of the run's curriculum follows another."""
    for step in phase_starts(run):
        ax.axvline(step + offset - 0.5, color=GREY, linewidth=0.8, linestyle=(0, (1, 3)))


def phase_starts(run: Run) -> list[int]:
    """Return the steps at which a phase begins, except the first; none without a curriculum."""
    if not run.has(CURRICULUM_PHASE):
        return []
    phases = run.values(CURRICULUM_PHASE)
    return [int(step) for step in phases.index[1:][phases.diff().iloc[1:].ne(0)]]


def label_runs(ax: Axes, runs: Sequence[Run], offsets: Sequence[int]) -> None:
    """Mark where one run ends and the next begins."""
    for run, offset in zip(runs, offsets, strict=False):
        place = (offset + 0.5, 1.02)
        ax.annotate(run.label, place, xycoords=("data", "axes fraction"), fontsize=8, color=GREY)
        if offset:
            ax.axvline(offset + 0.5, color=GREY, linewidth=1, linestyle=(0, (2, 2)))


def draw_line(
    ax: Axes,
    run: Run,
    offset: int,
    metric: str,
    color: str = BLUE,
    label: str | None = None,
    *,
    linestyle: LineStyleType = "-",
    faint: float = 0.25,
) -> None:
    """Draw a curve; a long one is drawn faint, with a running mean in front of it."""
    values = run.values(metric)
    steps = values.index + offset
    if len(values) <= MAX_PLAIN_POINTS:
        ax.plot(steps, values, linestyle=linestyle, color=color, linewidth=1.6, label=label)
        return
    mean = values.rolling(max(5, len(values) // 30), min_periods=1, center=True).mean()
    ax.plot(steps, values, color=color, linewidth=1, alpha=faint)
    ax.plot(steps, mean, linestyle=linestyle, color=color, linewidth=1.6, label=label)


def draw_accuracy(ax: Axes, run: Run, offset: int) -> None:
    """Draw greedy accuracy with its last value, and the accuracies of samples if there are any."""
    others = [str(name) for name in run.metrics if str(name).startswith(("val/avg@", "val/pass@"))]
    for name, color in zip(others, (ORANGE, GREEN, PURPLE, RED), strict=False):
        values = run.values(name)
        label = name.removeprefix("val/")
        ax.plot(values.index + offset, values, color=color, linewidth=1.2, label=label)
    values = run.values(ACCURACY)
    greedy = "greedy" if others else None
    ax.plot(values.index + offset, values, ".-", color=BLUE, linewidth=1.6, label=greedy)
    place = (values.index[-1] + offset, values.iloc[-1])
    text = f"{values.iloc[-1]:.3f}"
    ax.annotate(text, place, (-3, 5), textcoords="offset points", ha="right", fontsize=9)


def draw_reward(ax: Axes, run: Run, offset: int) -> None:
    if run.has("reward/std"):
        mean, deviation = run.values("reward/mean").align(run.values("reward/std"), join="inner")
        steps = mean.index + offset
        low, high = mean - deviation, mean + deviation
        ax.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0)
    draw_line(ax, run, offset, "reward/mean", label="mean ± in-group deviation")


def draw_sources(ax: Axes, run: Run, offset: int) -> None:
    found = [one for one in run.sources if run.has(f"reward/{one}/mean")]
    for source, color in zip(found, cycle((BLUE, ORANGE, GREEN, PURPLE, RED)), strict=False):
        draw_line(ax, run, offset, f"reward/{source}/mean", color, source)


def draw_length(ax: Axes, run: Run, offset: int) -> None:
    if run.has("completions/min_length") and run.has("completions/max_length"):
        low, high = run.values("completions/min_length"), run.values("completions/max_length")
        low, high = low.align(high, join="inner")
        ax.fill_between(low.index + offset, low, high, color=GREEN, alpha=0.12, linewidth=0)
    draw_line(ax, run, offset, LENGTH, GREEN, "mean, shortest to longest")


def draw_phases(ax: Axes, run: Run, offset: int) -> None:
    """Draw the seconds of a step as stacked phases."""
    total = run.values(STEP_TIME)
    found = {
        phase: run.values(f"timing/{phase}_duration_s").reindex(total.index, fill_value=0)
        for phase in STEP_PHASES
        if run.has(f"timing/{phase}_duration_s")
    }
    found = {phase: part for phase, part in found.items() if part.sum() > 0.005 * total.sum()}
    ax.margins(y=0.35)  # room for the legend
    other = (total - sum(found.values())).clip(lower=0)
    names = [*(STEP_PHASES[phase][0] for phase in found), "other"]
    colors = [*(STEP_PHASES[phase][1] for phase in found), GREY]
    ax.stackplot(
        total.index + offset,
        *found.values(),
        other,
        labels=names,
        colors=colors,
        alpha=0.8,
        linewidth=0,
    )


def draw_memory(ax: Axes, run: Run, offset: int) -> None:
    has_reserved = run.has("perf/memory_reserved_gb")
    if has_reserved:
        draw_line(ax, run, offset, "perf/memory_reserved_gb", ORANGE, "reserved")
    label = "allocated" if has_reserved else "process (resident)"
    draw_line(ax, run, offset, "perf/memory_allocated_gb", BLUE, label)


PANELS = (
    Panel(title="Held-out accuracy", metric=ACCURACY, draw=draw_accuracy),
    Panel(title="Reward", metric="reward/mean", draw=draw_reward),
    Panel(title="Reward by source", metric="reward/mean", draw=draw_sources, is_by_source=True),
    Panel(title="Completion length", metric=LENGTH, unit="tokens", draw=draw_length),
    Panel(title="SFT loss", metric="sft/loss", unit=NATS),
    Panel(title="Policy loss", metric="policy/loss"),
    Panel(title="KL to the reference", metric="policy/kl", unit=NATS, shows_zeros=False),
    Panel(title="Entropy", metric="policy/entropy", unit=NATS, color=GREEN),
    Panel(title="Gradient norm", metric="policy/grad_norm", color=PURPLE),
    Panel(title="Time per step", metric=STEP_TIME, unit="seconds", draw=draw_phases),
    Panel(title="Throughput", metric="perf/tokens_per_second", unit=SPEED, color=GREEN),
    Panel(title="Memory", metric="perf/memory_allocated_gb", unit="GiB", draw=draw_memory),
)
