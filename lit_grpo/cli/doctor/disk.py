"""Check that the run directory can be written, and has room for the files of the run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from lit_grpo.cli.built_run import BuiltRun
from lit_grpo.cli.doctor.batch import planned_steps
from lit_grpo.cli.doctor.estimate import CLOSE
from lit_grpo.cli.doctor.findings import Finding, failed, ok, refused, remark
from lit_grpo.cli.estimate.memory import gib
from lit_grpo.cli.estimate.model_sizes import (
    build_optimizer,
    optimizer_sizes,
    size_of,
    trained,
    weight_bytes,
)
from lit_grpo.cli.estimate.step import StepSizes, make_step
from lit_grpo.rollout.server.engine import ServedEngine
from lit_grpo.runs.checkpoints.files import last_checkpoint
from lit_grpo.runs.files.log import not_writable
from lit_grpo.runs.files.writable import check_writable, nearest, try_writing
from lit_grpo.types import UserError

BYTES_PER_TOKEN = 6
"""Bytes of a completion's token in parquet: its id and its text, compressed."""
BYTES_PER_ROW = BYTES_PER_SCORE = 24
"""Bytes of a row without its tokens, and of each of its scores."""
BYTES_PER_FILE, BYTES_PER_FILE_AND_REWARD = 4000, 1500
"""Bytes of a file without rows, and of each reward in it: schema and statistics of columns.

Measured on files of 2 to 512 rows with 1 to 6 rewards; a file of 4 short rows has 5 to 13 KB.
"""


def check_disk(run: BuiltRun) -> Iterator[Finding]:
    """Compare what the run will write with the free space, and try the places of its files."""
    for judged in run.judged:
        if judged.judge.cache is not None:
            yield from _check_place("judge.cache", judged.judge.cache)
    if run.checkpoints is not None and (dirpath := run.checkpoints.dirpath) is not None:
        yield from _check_place("Checkpoints.init_args.dirpath", dirpath)
    run_dir = Path(run.cli.config.run_dir)
    try:
        try_writing(run_dir)
    except OSError as error:
        yield refused(str(not_writable(run_dir, error)))
        return
    if last_checkpoint(run_dir) is not None or (run_dir / "metrics.csv").exists():
        command = "fit" if run.grpo else "sft"
        yield remark(
            f"{run_dir} holds a run: lit-grpo {command} {run_dir} resumes it; a new run needs "
            "another run_dir."
        )
    free = shutil.disk_usage(nearest(run_dir)).free
    needs = written_bytes(run)
    total = sum(needs.values())
    listed = ", ".join(f"{name} {gib(size)}" for name, size in needs.items() if size)
    text = f"The run writes about {gib(total)} to {run_dir}, where {gib(free)} are free: {listed}."
    fix = "Set run_dir to a directory with more space, or keep_last of Checkpoints to 1."
    if total > free:
        yield failed(text, fix)
    elif total > CLOSE * free:
        yield remark(f"{text} {fix}")
    else:
        yield ok(text)


def _check_place(key: str, directory: str | Path) -> Iterator[Finding]:
    try:
        check_writable(key, directory, Path(directory).expanduser())
    except UserError as error:
        yield refused(str(error))


def written_bytes(run: BuiltRun) -> dict[str, int]:
    """Return bytes on disk when the run ends, by item.

    Raises:
        NotChecked: the model cannot be read.
    """
    outline, step = run.outline.get(), make_step(run)
    policy = run.module.policy
    weights, adapter = weight_bytes(outline), size_of(trained(outline))
    # The frozen base of an adapter and a reference that never moves are read from the path again.
    saved = weights if policy.lora is None or policy.path is None else adapter
    if run.module.needs_reference and policy.lora is None:
        is_reloaded = policy.path is not None and not run.module.refreshes_reference
        saved += 0 if is_reloaded else weights
    optimizer = build_optimizer(outline, run.module.build_optimizer)
    saved += optimizer_sizes(outline, optimizer).state_bytes
    final = weights if policy.lora is None or policy.merge_lora else adapter
    needs = {"checkpoints": num_checkpoints(run) * saved, "final model": final}
    if run.grpo:
        num_files = step.num_ranks * (planned_steps(run) or 0)
        num_rewards = len(run.grpo.rewards.rewards)
        needs["completions (at most)"] = num_files * completions_bytes(step, num_rewards)
    engine = run.module.engine
    if isinstance(engine, ServedEngine) and engine.api.reads_files:
        # The version in use, the next one and the model that the servers start with.
        needs["weights for servers"] = 3 * weights if policy.lora is None else weights + 2 * adapter
    return needs


def completions_bytes(step: StepSizes, num_rewards: int) -> int:
    """Return the bytes of the completions of one step and rank, all as long as the longest."""
    row = BYTES_PER_ROW + num_rewards * BYTES_PER_SCORE + step.row_tokens * BYTES_PER_TOKEN
    return BYTES_PER_FILE + num_rewards * BYTES_PER_FILE_AND_REWARD + step.num_rows * row


def num_checkpoints(run: BuiltRun) -> int:
    """Return how many checkpoints can exist at a time, one that is being written included."""
    callback = run.checkpoints
    if callback is None:
        return 0
    num_steps, every = planned_steps(run), callback.every_n_steps
    kept = callback.keep_last + 1  # the newest one of a healthy run
    if num_steps is not None and every is not None and callback.every_n_seconds is None:
        kept = min(kept, num_steps // every + 2)  # the first step and the end
    return kept + 1 + (callback.monitor is not None)
