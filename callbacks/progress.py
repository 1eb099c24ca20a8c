"""Show the progress of a run: one live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import (
    BatchesProcessedColumn,
    CustomBarColumn,
    CustomTimeColumn,
)
from rich import get_console
from rich.console import Group, RenderableType
from rich.progress import ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from lit_grpo.types import check_range

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


class RolloutProgressBar(RichProgressBar):
    """Show one bar for the whole run: reward, in-group deviation, loss, KL, length and tokens/s.

    Where no live bar can be drawn (a pipe, a file, a scheduler's log), print plain lines.

    Args:
        every_n_steps: Print a plain line every this many steps.
        refresh_rate: Updates of the live bar per second.
    """

    def __init__(self, every_n_steps: int = 10, refresh_rate: int = 10) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=True)
        check_range("RolloutProgressBar.init_args.every_n_steps", every_n_steps, at_least=1)
        self.every_n_steps = every_n_steps
        self._is_live = False
        self._printed_at = time.perf_counter()
        self._printed_step = -1

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        console = get_console()
        self._is_live = console.is_interactive or console.is_jupyter

    @property
    def is_enabled(self) -> bool:
        return self._is_live and super().is_enabled

    @property
    def total_train_batches(self) -> int | float:
        """Rollout steps of the whole run, estimated where ``max_steps`` counts optimizer steps."""
        trainer = self.trainer
        done = trainer.fit_loop.total_batch_idx + 1
        limits: list[int | float] = []
        if trainer.max_epochs and trainer.max_epochs > 0:
            limits.append(trainer.num_training_batches * trainer.max_epochs)
        if trainer.max_steps > 0:
            # A rollout step may have several optimizer steps; their number shows during the run.
            optimizer_steps = max(trainer.global_step, 1)
            limits.append(round(trainer.max_steps * max(done, 1) / optimizer_steps))
        return min(limits, default=float("inf"))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._printed_at = time.perf_counter()
        self._printed_step = trainer.fit_loop.total_batch_idx

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.is_enabled and self.train_progress_bar_id is None:
            self._initialize_train_progress_bar_id()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.fit_loop.total_batch_idx
        super().on_train_batch_end(trainer, pl_module, outputs, batch, step)
        if self.is_enabled:
            self._show_metrics(trainer)
        elif trainer.is_global_zero and not self._is_live:
            self._print_regularly(trainer, step)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        if self.is_enabled:
            self._show_metrics(trainer)
        elif trainer.is_global_zero and not self._is_live:
            self._print(trainer, "validation", only=("val/accuracy",))

    def _show_metrics(self, trainer: L.Trainer) -> None:
        if self.progress is not None and self.train_progress_bar_id is not None:
            total, metrics = self.total_train_batches, metrics_line(trainer.callback_metrics)
            self.progress.update(self.train_progress_bar_id, total=total, metrics=metrics)

    def _get_train_description(self, current_epoch: int) -> str:
        return f"{'Training':{len(self.validation_description)}}"

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Return nothing: the metrics have their own line, not Lightning's column."""
        return {}

    def configure_columns(self, trainer: L.Trainer) -> list[ProgressColumn]:
        bar, done = self.theme.progress_bar, self.theme.progress_bar_finished
        return [
            TwoLines(
                TextColumn("{task.description}"),
                CustomBarColumn(bar_width=20, complete_style=bar, finished_style=done),
                BatchesProcessedColumn(style=self.theme.batch_progress),
                CustomTimeColumn(style=self.theme.time),
                SecondsPerStepColumn(),
            )
        ]

    def _print_regularly(self, trainer: L.Trainer, step: int) -> None:
        is_first = self._printed_step < 0
        is_last = step + 1 == self.total_train_batches
        if is_first or is_last or (step + 1) % self.every_n_steps == 0:
            now = time.perf_counter()
            seconds = (now - self._printed_at) / max(1, step - self._printed_step)
            self._printed_at, self._printed_step = now, step
            self._print(trainer, f"{seconds:.2f} s/step")

    def _print(self, trainer: L.Trainer, what: str, only: Collection[str] = tuple(SHOWN)) -> None:
        metrics = {name: value for name, value in trainer.callback_metrics.items() if name in only}
        total = self.total_train_batches
        step = trainer.fit_loop.total_batch_idx + 1
        of = "" if total == float("inf") else f"/{total:.0f}"
        print(f"step {step}{of}  {what}  {metrics_line(metrics)}", flush=True)


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """Return the main metrics under short names: ``reward 0.500±0.250  loss 0.0123``."""
    shown: dict[str, str] = {}
    for metric, (name, spec) in SHOWN.items():
        if metric in metrics:
            shown[name] = format(float(metrics[metric]), spec)
    return "  ".join(f"{name} {value}" for name, value in shown.items()).replace("  ± ", "±")


class TwoLines(ProgressColumn):
    """Columns side by side with the task's ``metrics`` below, to fit narrow terminals."""

    def __init__(self, *columns: ProgressColumn) -> None:
        super().__init__()
        self.columns = columns

    def render(self, task: Task) -> RenderableType:
        first = Table.grid(padding=(0, 1))
        first.add_row(*(column(task) for column in self.columns))
        metrics = task.fields.get("metrics")
        return Group(first, Text(metrics)) if metrics else first


class SecondsPerStepColumn(ProgressColumn):
    """Seconds per step, not steps per second: a rollout step takes seconds or minutes."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(f"{1 / task.speed:.2f} s/step" if task.speed else "", style="dim")
