"""The directory ``completions/`` of a run: every completion with its scores, as parquet."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch.callbacks import Callback

from lit_grpo.runs.files.writable import check_writable
from lit_grpo.types import RolloutBatch, TrainBatch, UserError
from lit_grpo.types.atomic import replacing_file

NAME = re.compile(r"step_(\d+)(?:_rank\d+)?\.parquet")


class CompletionsFile(Callback):
    """Write the completions, scores and advantages of each rollout step as parquet.

    The file is ``completions/step_000012.parquet``, with several ranks
    ``completions/step_000012_rank1.parquet``; it has a row for each completion. An invalid row has
    no reward, and a row that was not trained on has no advantage. The step whose missing scores
    ended the run is written as well.

    Files of steps that are taken again are removed first, since the run may end before them.

    Args:
        run_dir: Directory of the run.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.directory = Path(run_dir) / "completions"

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_writable("run_dir", self.directory, self.directory)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.local_rank == 0:
            files = files_by_step(self.directory.parent)
            for step in files.keys() - range(trainer.fit_loop.total_batch_idx + 1):
                for path in files[step]:
                    path.unlink(missing_ok=True)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        is_trial = trainer.fast_dev_run  # type: ignore[attr-defined]
        if is_trial or not isinstance(outputs, Mapping) or "rollouts" not in outputs:
            return
        self._write(trainer, outputs["rollouts"], outputs["batch"])

    def on_abandoned_rollouts(
        self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: RolloutBatch
    ) -> None:
        """Write the rows that show why scores are missing."""
        self._write(trainer, rollouts)

    def _write(
        self, trainer: L.Trainer, rollouts: RolloutBatch, batch: TrainBatch | None = None
    ) -> None:
        step = trainer.fit_loop.total_batch_idx
        rank = "" if trainer.world_size == 1 else f"_rank{trainer.global_rank}"
        path = self.directory / f"step_{step:06d}{rank}.parquet"
        write_table(completions_table(step, rollouts, batch), path)


def files_by_step(run_dir: Path) -> dict[int, list[Path]]:
    """Return step -> its files, one for each rank."""
    files: defaultdict[int, list[Path]] = defaultdict(list)
    for path in sorted((run_dir / "completions").glob("step_*.parquet")):
        if match := NAME.fullmatch(path.name):
            files[int(match[1])].append(path)
    return dict(files)


def count_tokens(run_dir: Path, steps: Iterable[int]) -> int | None:
    """Return the sampled tokens of finished steps; None if a file is missing or damaged."""
    files = files_by_step(run_dir)
    counts = [_num_tokens(path) for step in steps for path in files.get(step, [None])]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


@cache  # the report of a live run is written again and again
def _num_tokens(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        return int(pq.read_table(path, columns=["num_tokens"])["num_tokens"].to_numpy().sum())
    except (OSError, pa.ArrowException):
        return None


def read_completions(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the given columns, as far as a file has them; by default all of its columns.

    Raises:
        UserError: the file is damaged.
    """
    try:
        there = pq.read_schema(path).names
        wanted = there if columns is None else columns
        return pq.read_table(path, columns=[one for one in wanted if one in there])
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read: {str(error).rstrip('.')}. Move it away to go on without it."
        ) from error


def damaged_files(run_dir: Path) -> list[Path]:
    """Return the files that cannot be read."""
    return [
        path for path in chain.from_iterable(files_by_step(run_dir).values()) if _is_damaged(path)
    ]


def _is_damaged(path: Path) -> bool:
    try:
        pq.read_metadata(path)
    except (OSError, pa.ArrowException):
        return True
    return False


def split_groups(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split the rows of a file into groups.

    Older versions of lit-grpo did not number the groups. All of a file have one size, but adjacent
    ones may have the same prompt and look like one.
    """
    if not rows or "group" in rows[0]:
        return [list(group) for _, group in groupby(rows, itemgetter("group"))]
    size = math.gcd(*(len(list(group)) for _, group in groupby(rows, itemgetter("prompt_id"))))
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def write_table(table: pa.Table, path: Path) -> None:
    """Write a parquet file and move it into place, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as partial:
        pq.write_table(table, partial)


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
