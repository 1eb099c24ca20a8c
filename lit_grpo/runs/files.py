"""The files that every run writes: ``metrics.csv``, ``completions/``, ``final/`` and ``run.log``.

They are written locally, in addition to what remote loggers send.
"""

from __future__ import annotations

import csv
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.runs.model_card import write_model_card
from lit_grpo.runs.saves import replacing
from lit_grpo.runs.space import warn_of_space
from lit_grpo.stopping import get_stop_reason
from lit_grpo.types import RolloutBatch, TrainBatch

log = logging.getLogger(__name__)

Row = dict[str, float]


def next_run_dir(root: str | Path, name: str) -> Path:
    """Create ``root/name/version`` with the next free number and return it."""
    parent = Path(root) / name
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
    version = max(taken, default=-1) + 1
    while True:
        try:
            (parent / str(version)).mkdir()
        except FileExistsError:  # another run started at the same moment
            version += 1
        else:
            return parent / str(version)


class MetricsFile(Logger):
    """Write ``metrics.csv``: one row for each rollout step, with training and validation metrics.

    The file is complete after every step. A metric that appears later adds a column at the end.
    A resumed run keeps the rows before its first training step and rewrites the others.

    Column ``step`` is the rollout step, from 0; ``seconds`` is the running time at the start of the
    row, without the time between a stop and a resumption; ``resumes`` is the number of times that
    the run had been resumed.
    """

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__()
        self.path = Path(run_dir) / "metrics.csv"
        self._start = time.monotonic()
        self._seconds_before = 0.0
        self._columns = ["step", "seconds", "resumes"]
        self._num_resumes = 0
        self._rows: dict[int, Row] | None = None
        self._earlier_steps: set[int] = set()
        """Steps that an earlier process wrote; empty once this one has trained a step."""
        self._evaluated: dict[int, Row] = {}
        """What was measured before the first step of this process, whose row keeps it."""
        self._last_row_at: int | None = None
        """Offset of the last row in the file; None if the whole file must be rewritten."""

    @property
    def name(self) -> str:
        """Empty, as ``version``, so that Lightning uses ``save_dir`` as the run directory."""
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the hyper-parameters are in ``config.yaml``."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        rows = self._open()
        step = max(rows, default=0) if step is None else step
        if not _is_evaluation(values):
            self._forget_from(step)
        elif self._earlier_steps:
            self._evaluated.setdefault(step, {}).update(values)
        if step not in rows:
            self._begin_row(step)
        rows[step] |= values
        new_columns = [name for name in values if name not in self._columns]
        self._columns += new_columns
        if self._last_row_at is None or new_columns or step != max(rows):
            self._write_all()
        else:
            self._write_last_row(self._last_row_at)

    def finalize(self, status: str) -> None:
        """Forget the rows when a training ends: a further one, by the same trainer, resumes it."""
        self._start = time.monotonic()
        self._rows, self._last_row_at = None, None

    def _open(self) -> dict[int, Row]:
        if self._rows is None:
            self._rows = {}
            if self.path.exists():
                columns, self._rows = _read(self.path)
                self._columns = list(dict.fromkeys([*columns, *self._columns]))
                earlier = [row.get("resumes", 0) for row in self._rows.values()]
                self._num_resumes = int(max(earlier, default=-1)) + 1
            self._earlier_steps = set(self._rows)
            self._seconds_before = self._seconds_of_last_row()
        return self._rows

    def _forget_from(self, step: int) -> None:
        """Drop the rows of an earlier process from this step on: this run writes them again."""
        rows = self._open()
        if later := [earlier for earlier in self._earlier_steps if earlier >= step]:
            for one in later:
                del rows[one]
            self._last_row_at = None
            self._seconds_before = self._seconds_of_last_row()
            if step in self._evaluated:
                self._begin_row(step)
                rows[step] |= self._evaluated[step]
        self._earlier_steps, self._evaluated = set(), {}

    def _seconds_of_last_row(self) -> float:
        rows = self._open()
        return rows[max(rows)]["seconds"] if rows else 0.0

    def _begin_row(self, step: int) -> None:
        seconds = self._seconds_before + time.monotonic() - self._start
        rows = self._open()
        rows[step] = {"step": step, "seconds": round(seconds, 3), "resumes": self._num_resumes}
        if self._last_row_at is not None:
            self._last_row_at = self.path.stat().st_size

    def _write_all(self) -> None:
        """Replace the file in one move, so that a reader never sees half of it."""
        rows = self._open()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(".metrics.csv.partial")
        with partial.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(self._columns)
            *earlier, last = sorted(rows)
            for step in earlier:
                self._write_row(file, rows[step])
            self._last_row_at = file.tell()
            self._write_row(file, rows[last])
        os.replace(partial, self.path)

    def _write_last_row(self, position: int) -> None:
        rows = self._open()
        with self.path.open("r+", newline="") as file:
            file.seek(position)
            self._write_row(file, rows[max(rows)])
            file.truncate()

    def _write_row(self, file: TextIO, row: Row) -> None:
        whole = {name: int(row[name]) for name in ("step", "resumes") if name in row}
        cells = [(row | whole).get(name) for name in self._columns]
        csv.writer(file, lineterminator="\n").writerow(cells)


def _read(path: Path) -> tuple[list[str], dict[int, Row]]:
    """Return columns and rows; a last line cut off by a kill is dropped."""
    lines = path.read_text().splitlines(keepends=True)
    reader = csv.DictReader(line for line in lines if line.endswith("\n"))
    rows = [{name: float(cell) for name, cell in row.items() if cell} for row in reader]
    return list(reader.fieldnames or ()), {int(row["step"]): row for row in rows}


def _is_evaluation(values: Mapping[str, float]) -> bool:
    return all(name.startswith(("val/", "test/")) or name == "epoch" for name in values)


class CompletionsFile(Callback):
    """Write the completions, scores and advantages of each rollout step as parquet.

    The file is ``completions/step_000012.parquet``, with several ranks
    ``completions/step_000012_rank1.parquet``; it has a row for each completion. An invalid row has
    no reward, and a row that was not trained on has no advantage.

    Args:
        run_dir: Directory of the run.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.directory = Path(run_dir) / "completions"

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not isinstance(outputs, Mapping) or "rollouts" not in outputs:
            return
        step = trainer.fit_loop.total_batch_idx
        rank = "" if trainer.world_size == 1 else f"_rank{trainer.global_rank}"
        path = self.directory / f"step_{step:06d}{rank}.parquet"
        write_table(completions_table(step, outputs["rollouts"], outputs["batch"]), path)


def write_table(table: pa.Table, path: Path) -> None:
    """Write a parquet file and move it into place, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial)
    os.replace(partial, path)


def free_path(path: Path) -> Path:
    """Return the path, numbered if such a file exists already: ``rewards-1.parquet``."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(1))
    return next(candidate for candidate in chain([path], numbered) if not candidate.exists())


def completions_table(
    step: int, rollouts: RolloutBatch, batch: TrainBatch | None = None
) -> pa.Table:
    """Return a table of N rows, in row order; without a train batch advantages are null."""
    rows = [(group, one) for group in rollouts.groups for one in group.completions]
    numbers = [number for number, one in enumerate(rollouts.groups) for _ in one.completions]
    text, number = pa.string(), pa.float64()
    columns = {
        "step": pa.array([step] * len(rows), pa.int64()),
        "group": pa.array(numbers, pa.int64()),
        "prompt_id": pa.array([group.prompt.id for group, _ in rows], text),
        "source": pa.array([group.prompt.source for group, _ in rows], text),
        "prompt": pa.array([group.prompt.text for group, _ in rows], text),
        "completion": pa.array([completion.text for _, completion in rows], text),
        "finish_reason": pa.array([completion.finish_reason for _, completion in rows], text),
        "num_tokens": pa.array([len(completion.token_ids) for _, completion in rows], pa.int64()),
        "token_ids": pa.array([one.token_ids for _, one in rows], pa.list_(pa.int32())),
        "answer": pa.array([group.prompt.answer for group, _ in rows], text),
        "reward": pa.array(rollouts.rewards.flatten().numpy(), number, from_pandas=True),
        "valid": pa.array(rollouts.valid.flatten().numpy(), pa.bool_()),
        "advantage": pa.array(_trained_advantages(batch, len(rows)), number),
    }
    for name in rollouts.groups[0].scores:
        scores = [score for group in rollouts.groups for score in group.scores[name]]
        columns[f"score/{name}"] = pa.array([score.value for score in scores], number)
        columns[f"outcome/{name}"] = pa.array([str(score.outcome) for score in scores], text)
        columns[f"detail/{name}"] = pa.array([score.detail for score in scores], text)
        columns[f"seconds/{name}"] = pa.array([score.seconds for score in scores], number)
        columns[f"cost/{name}"] = pa.array([score.cost for score in scores], number)
    return pa.table(columns)


def _trained_advantages(batch: TrainBatch | None, num_rows: int) -> list[float | None]:
    if batch is None:
        return [None] * num_rows
    trained = batch.loss_mask.any(1).tolist()
    advantages = batch.advantages
    if advantages.ndim == 2:  # the mean over the tokens
        advantages = (advantages * batch.loss_mask).sum(1) / batch.loss_mask.sum(1).clamp(min=1)
    pairs = zip(advantages.tolist(), trained, strict=True)
    return [advantage if is_trained else None for advantage, is_trained in pairs]


class FinalModel(Callback):
    """Write the trained policy to ``final/`` as a Hugging Face model when training is done.

    A run that was stopped writes none because it can be resumed. The directory is moved into place
    when it is complete; one that a killed process has not written comes with the next start of the
    run. It includes a model card, ``README.md``.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "final"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if get_stop_reason(trainer) is None:
            self._write(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        is_missing = trainer.strategy.broadcast(not self.path.exists())
        if is_missing and get_stop_reason(trainer) is None:  # there was nothing left to train
            self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the directory on rank 0; the others take part in gathering a sharded policy."""
        policy: Any = pl_module.policy
        with self._folder(trainer, policy) as folder:
            policy.save_pretrained(folder, is_writer=trainer.is_global_zero)
            if trainer.is_global_zero:
                write_model_card(folder, self.path.parent, trainer, pl_module)
        trainer.strategy.barrier("FinalModel")

    @contextmanager
    def _folder(self, trainer: L.Trainer, policy: Any) -> Iterator[Path]:
        if not trainer.is_global_zero:
            yield self.path
            return
        log.info("writing the final model to %s", self.path)
        num_bytes, memory_bytes = policy.saved_bytes()
        warn_of_space(self.path, num_bytes=num_bytes, memory_bytes=memory_bytes)
        with replacing(self.path) as folder:
            yield folder
