"""The file ``metrics.csv`` of a run, which is written whatever remote loggers there are."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.runs.files.event_log import read_starts
from lit_grpo.runs.files.events import is_resumed
from lit_grpo.runs.safe_points import is_between_steps
from lit_grpo.stopping import is_step_unfinished
from lit_grpo.types.atomic import replacing_file

Row = dict[str, float]
FIRST_COLUMNS = ("step", "seconds", "resumes")
NOT_MEASURED = (*FIRST_COLUMNS, "epoch")


class MetricsFile(Logger, Callback):
    """Write ``metrics.csv``: one row for each rollout step, with training and validation metrics.

    The file is complete after every step. A metric that appears later adds a column at the end.
    A resumed run keeps the rows before its first training step and rewrites the others.

    Among the callbacks of a trainer as well, it writes the row of a step when the step is finished,
    and none of one that is left undone or fails. As a logger alone it writes whatever it is given.

    Column ``step`` is the rollout step, from 0, and -1 for a validation before training;
    ``seconds`` is the running time when the metrics of the step came, without the time between a
    stop and a resumption; ``resumes`` is the number of times that the run had been resumed.
    """

    step_before_training = -1
    """Step of a validation before training, which no later validation then replaces."""

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__()
        self.path = Path(run_dir) / "metrics.csv"
        self._start = time.monotonic()
        self._seconds_before = 0.0
        self._columns = list(FIRST_COLUMNS)
        self._num_resumes = 0
        self._is_new = False
        """Whether a training run has begun that is not resumed."""
        self._rows: dict[int, Row] | None = None
        self._earlier_steps: set[int] = set()
        """Steps that an earlier process wrote; empty once this one has trained a step."""
        self._evaluated: dict[int, Row] = {}
        """Values measured before the first step of this process, whose row keeps them."""
        self._last_row_at: int | None = None
        """Offset of the last row in the file; None if the whole file must be rewritten."""
        self._finished: int | None = None
        """The last step that this training has finished, -1 before the first; None if no training
        tells."""
        self._is_training = True
        """False in ``validate`` and ``test``, which do not belong to the run."""
        self._held: dict[int, Row] = {}
        """Values logged for steps that are not finished."""

    @property
    def name(self) -> str:
        """Empty, like ``version``, so that Lightning uses ``save_dir`` as the run directory."""
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
        if not self._is_training:
            return
        values = {name: float(value) for name, value in metrics.items()}
        step = max(self._open(), default=0) if step is None else step
        if _is_evaluation(values):
            self._add_evaluation(step, values)
        elif self._finished is None or step <= self._finished:
            self._add(step, values)
        else:
            self._held.setdefault(step, {}).update(values)

    def finalize(self, status: str) -> None:
        """Forget the rows when training ends: a further one, by the same trainer, resumes it."""
        self._start = time.monotonic()
        self._rows, self._last_row_at = None, None
        self._finished, self._held = None, {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._is_training = stage == "fit"
        # A run that was left in its first step has begun, but has no row.
        self._num_resumes = len(read_starts(self.path.parent))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finished, self._is_new = -1, not is_resumed(trainer)
        if self._is_new:
            self._num_resumes = 0

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._complete(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Release what was logged of a finished step; Lightning logs its metrics after this."""
        if not (_writes(trainer) and is_between_steps(trainer)):
            return
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if is_step_unfinished(trainer):
            self._held.clear()
            if self._open():
                self._forget_from(step)
                self._write_all()
            return
        self._finished = step
        for held in sorted(one for one in self._held if one <= step):
            self._add(held, self._held.pop(held))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._complete(trainer)

    def _complete(self, trainer: L.Trainer) -> None:
        """Give the last step a row if nothing was logged of it, although every step is logged."""
        is_logged = _writes(trainer) and trainer.log_every_n_steps == 1  # type: ignore[attr-defined]
        step = self._finished
        if is_logged and step is not None and step >= 0 and step not in self._open():
            self._add(step, {})

    def _add_evaluation(self, step: int, values: Row) -> None:
        rows = self._open()
        if self._earlier_steps:
            self._evaluated.setdefault(step, {}).update(values)
        if step not in rows:
            self._begin_row(step)
        self._fill(step, values)

    def _add(self, step: int, values: Row) -> None:
        """Add what a training step has measured to its row."""
        self._forget_from(step)
        rows = self._open()
        if step not in rows:
            self._begin_row(step)
        elif _is_evaluation(rows[step]):
            rows[step] |= self._clock()
        self._fill(step, values)

    def _fill(self, step: int, values: Row) -> None:
        rows = self._open()
        rows[step] |= values
        new_columns = [name for name in values if name not in self._columns]
        self._columns += new_columns
        if self._last_row_at is None or new_columns or step != max(rows):
            self._write_all()
        else:
            self._write_last_row(self._last_row_at)

    def _open(self) -> dict[int, Row]:
        if self._rows is None:
            self._rows = {}
            if self.path.exists():
                columns, self._rows = _read(self.path)
                self._columns = list(dict.fromkeys([*columns, *self._columns]))
                earlier = [row.get("resumes", 0) for row in self._rows.values()]
                in_rows = int(max(earlier, default=-1)) + 1
                self._num_resumes = 0 if self._is_new else max(in_rows, self._num_resumes)
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
        self._open()[step] = {"step": step} | self._clock()
        if self._last_row_at is not None:
            self._last_row_at = self.path.stat().st_size

    def _clock(self) -> Row:
        seconds = self._seconds_before + time.monotonic() - self._start
        return {"seconds": round(seconds, 3), "resumes": self._num_resumes}

    def _write_all(self) -> None:
        """Replace the file in one move, so that a reader never sees half of it."""
        rows = self._open()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(self.path) as partial, partial.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(self._columns)
            for step in sorted(rows):
                self._last_row_at = file.tell()
                self._write_row(file, rows[step])

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
    """Return whether values, or a row's values, are not from a training step."""
    return all(name.startswith(("val/", "test/")) or name in NOT_MEASURED for name in values)


def _writes(trainer: L.Trainer) -> bool:
    """Return whether this process writes the files of a training run."""
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]
