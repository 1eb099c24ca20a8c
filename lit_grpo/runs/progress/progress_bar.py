"""The progress bar of every run: a live bar in a terminal or a notebook, plain lines elsewhere.

Both show the progress within a step, which may take minutes. Threads of their own draw them,
because the main thread may be busy sampling.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich import get_console
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from lit_grpo.runs.progress.run_progress import RunProgress
from lit_grpo.stopping import get_stop_reason
from lit_grpo.types import check_range
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.keywords import checks_keywords

SHOWN = {
    "reward/mean": ("reward", ".3f"),
    "reward/std": ("±", ".3f"),
    "sft/loss": ("loss", ".4f"),
    "policy/loss": ("loss", ".4f"),
    "policy/kl": ("kl", ".4f"),
    "completions/mean_length": ("len", ".0f"),
    "perf/tokens_per_second": ("tok/s", ".0f"),
    "val/accuracy": ("acc", ".3f"),
}
"""Metric -> short name and format, in display order."""
MAX_PLAIN = 1e7
"""Numbers above it are shown with an exponent."""

POLL_SECONDS = 1.0
COLOUR = "#6206E0"  # Lightning's


@checks_keywords
@checks_types
class RolloutProgressBar(ProgressBar):
    """Show one bar for the whole run: steps, time left, the running stage and the main metrics.

    Where no live bar can be drawn (a pipe, a file, a scheduler's log, a notebook without
    ipywidgets), print plain lines. The counts come from the first process.

    Args:
        every_n_steps: Print a plain line every this many steps.
        refresh_rate: Updates of the live bar per second.
        every_n_seconds: Print a plain line with the running stage after this time without a line.
    """

    def __init__(
        self, every_n_steps: int = 10, refresh_rate: float = 4, every_n_seconds: float = 60.0
    ) -> None:
        super().__init__()
        key = "RolloutProgressBar.init_args"
        check_range(f"{key}.every_n_steps", every_n_steps, at_least=1)
        check_range(f"{key}.refresh_rate", refresh_rate, above=0)
        check_range(f"{key}.every_n_seconds", every_n_seconds, above=0)
        self.every_n_steps = every_n_steps
        self.refresh_rate = refresh_rate
        self.every_n_seconds = every_n_seconds
        self._is_enabled = True
        self._progress = RunProgress("Training", "step", 0, float("inf"), lambda: None)
        self._live: Live | None = None
        self._lines: PlainLines | None = None

    def disable(self) -> None:
        self._is_enabled = False

    def enable(self) -> None:
        self._is_enabled = True

    @property
    def total_train_batches(self) -> int | float:
        """Rollout steps of the whole run; ``max_steps`` counts optimizer steps."""
        trainer = self.trainer
        limits: list[int | float] = []
        if trainer.max_epochs and trainer.max_epochs > 0:
            limits.append(trainer.num_training_batches * trainer.max_epochs)
        if trainer.max_steps > 0:
            limits.append(trainer.fit_loop.total_batch_idx + 1 + self._num_left())
        return min(limits, default=float("inf"))

    def _num_left(self) -> int:
        """Return the rollout steps (for SFT: batches) until ``max_steps`` is reached."""
        trainer = self.trainer
        loop, accumulated = trainer.fit_loop.epoch_loop, trainer.accumulate_grad_batches
        count = getattr(trainer.lightning_module, "num_batches", lambda steps: steps * accumulated)
        num_left: int = count(trainer.max_steps - trainer.global_step)
        is_between = not loop.batch_progress.is_last_batch
        return num_left - is_between * ((loop.batch_idx + 1) % accumulated)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        num_done = trainer.fit_loop.total_batch_idx + 1
        self._show(pl_module, "Training", "step", num_done, self.total_train_batches)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._progress.begin_step()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        reason = get_stop_reason(trainer)
        if reason is not None and reason.is_step_unfinished:
            return
        self._progress.end_step(trainer.fit_loop.total_batch_idx + 1, self.total_train_batches)
        metrics = trainer.callback_metrics
        if self._lines is None:
            self._progress.metrics = metrics_line(metrics)
            return
        # A line is about its step; values of val/ are from an earlier one.
        of_step = {name: value for name, value in metrics.items() if not name.startswith("val/")}
        self._progress.metrics = metrics_line(of_step)
        self._lines.end_step()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._show(pl_module, "Validation", "batch", 0, sum(trainer.num_val_batches))

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(pl_module, "Testing", "batch", 0, sum(trainer.num_test_batches))

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn == "fit":
            self._progress.begin_validation(batch_idx, sum(trainer.num_val_batches))
        else:
            self._progress.begin_step()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn != "fit":
            self._progress.end_step(batch_idx + 1, self._progress.total)

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        self._progress.metrics = metrics_line(metrics)
        if self._lines is not None:
            accuracy = {name: metrics[name] for name in ("val/accuracy",) if name in metrics}
            self._lines.print(f"validation  {metrics_line(accuracy)}")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._progress.activity = "saving a checkpoint"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._progress.activity = "saving the results"

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _show(
        self,
        pl_module: L.LightningModule,
        title: str,
        unit: str,
        num_done: int,
        total: int | float,
    ) -> None:
        if not self._is_enabled:
            return
        events = getattr(pl_module, "events", None)
        self._progress = RunProgress(
            title,
            unit,
            num_done,
            total,
            running_stage=lambda: getattr(events, "running", None),
            is_paused=lambda: getattr(events, "is_paused", False),
        )
        console = get_console()
        if can_draw_live(console):
            self._live = Live(
                console=console,
                refresh_per_second=self.refresh_rate,
                get_renderable=lambda: draw(self._progress),
            )
            self._live.start()
        else:
            self._lines = PlainLines(self._progress, self.every_n_steps, self.every_n_seconds)
            self._lines.start()

    def _stop(self) -> None:
        self._progress.activity = ""
        for shown in (self._live, self._lines):
            if shown is not None:
                shown.stop()
        self._live = self._lines = None


def can_draw_live(console: Console) -> bool:
    """Return whether rich can draw over what it has drawn: in notebooks, it needs ipywidgets."""
    if not console.is_jupyter:
        return console.is_interactive
    try:
        importlib.import_module("ipywidgets")
    except ImportError:  # rich would show only its advice to install it
        return False
    return True


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """Return the main metrics under short names: ``reward 0.500±0.250  loss 0.0123``."""
    shown: dict[str, str] = {}
    for metric, (name, spec) in SHOWN.items():
        if metric in metrics:
            value = float(metrics[metric])
            shown[name] = format(value, spec if abs(value) < MAX_PLAIN else ".3e")
    return "  ".join(f"{name} {value}" for name, value in shown.items()).replace("  ± ", "±")


def draw(progress: RunProgress) -> RenderableType:
    """Draw the bar with a line on what is being done and one with metrics, for narrow terminals."""
    first = Table.grid(padding=(0, 1))
    is_endless = progress.total == float("inf")
    bar = Bar(
        total=None if is_endless else progress.total,
        completed=progress.num_done,
        width=20,
        complete_style=COLOUR,
        finished_style=COLOUR,
    )
    cells = (progress.title, bar, progress.count, progress.clock, progress.speed)
    first.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    lines = filter(None, (progress.doing(), progress.metrics))
    return Group(first, *map(Text, lines))


class PlainLines:
    """Print lines at some steps, and one on the running stage if none was printed for a while."""

    def __init__(self, progress: RunProgress, every_n_steps: int, every_n_seconds: float) -> None:
        self._progress = progress
        self._every_n_steps = every_n_steps
        self._every_n_seconds = every_n_seconds
        self._has_printed_step = False
        self._printed_at = time.monotonic()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()

    def end_step(self) -> None:
        """Print the first step, the last one and every n-th."""
        progress = self._progress
        is_regular = progress.num_done % self._every_n_steps == 0
        is_last = progress.num_done == progress.total
        if is_regular or is_last or not self._has_printed_step:
            self._has_printed_step = True
            left = f"{progress.time_left} left" if progress.time_left and not is_last else ""
            self.print("  ".join(filter(None, (progress.speed, left, progress.metrics))))

    def print(self, what: str) -> None:
        self._printed_at = time.monotonic()
        print(f"{self._progress.unit} {self._progress.count}  {what}", flush=True)

    def _watch(self) -> None:
        poll = min(POLL_SECONDS, self._every_n_seconds)
        while not self._is_stopped.wait(poll):
            doing = self._progress.doing()
            if doing and time.monotonic() - self._printed_at >= self._every_n_seconds:
                self.print(doing)
