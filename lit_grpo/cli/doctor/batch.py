"""Report the size of a rollout step, the number of steps, and when checkpoints are written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lit_grpo.cli.built_run import BuiltRun
from lit_grpo.cli.doctor.findings import Finding, ok, remark
from lit_grpo.cli.estimate.step import StepSizes, make_step
from lit_grpo.data import TrainingLoader
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.stopping import has_step_limit, zero_limit
from lit_grpo.training.batching import UpdateConfig
from lit_grpo.training.checks.compatibility import is_endless
from lit_grpo.training.checks.learning_rates import warn_of_rate, warn_of_warm_up
from lit_grpo.training.checks.strategies import refuse_unsupported
from lit_grpo.training.checks.trainer_features import refuse_automatic
from lit_grpo.training.checks.unused_settings import settings_without_effect
from lit_grpo.training.checks.watched_metrics import check_monitors, warn_if_never_checked
from lit_grpo.types import UserError


def check_batch(run: BuiltRun) -> Iterator[Finding]:
    """Yield findings on what a step consists of, and how many steps there are."""
    refuse_unsupported(run.trainer)
    refuse_automatic(run.trainer, run.module)
    step = make_step(run)
    if run.grpo:
        grpo = run.grpo
        for message in settings_without_effect(grpo.objective, grpo.advantage, grpo.update):
            yield remark(message)
    yield ok(_sizes(step, run))
    if run.grpo:
        yield from _updates(step, run.grpo.update)
    yield from _length(run)
    warn_of_warm_up(run.trainer, run.module.warmup_steps)
    with suppress(UserError):  # which the checks of memory and disk report
        warn_of_rate(run.module.build_optimizer([nn.Parameter(torch.zeros(1))]), run.module)


def _sizes(step: StepSizes, run: BuiltRun) -> str:
    num_prompts = len(step.prompt_lengths)
    total = step.num_ranks * num_prompts
    each = "" if step.num_ranks == 1 else f", on {step.num_ranks} processes with {num_prompts} each"
    if run.grpo is None:
        rows = f"{total:,} prompts with their targets per batch{each}"
    else:
        rows = (
            f"{total:,} prompts x {step.group_size} completions (model.group_size) = "
            f"{total * step.group_size:,} completions per rollout step{each}"
        )
    return (
        f"{rows}; at most {step.num_tokens:,} tokens: prompts of up to {step.prompt_lengths[0]:,}, "
        f"completions of up to {step.completion_tokens:,}."
    )


def _updates(step: StepSizes, update: UpdateConfig) -> Iterator[Finding]:
    budget = update.max_tokens_per_micro_batch
    steps = several(step.optimizer_steps, "optimizer step")
    parts = several(step.micro_batches, "micro-batch", "micro-batches")
    yield ok(
        f"{steps} per rollout step, each from at most {parts} of up to "
        f"{step.micro_batch_tokens:,} tokens (model.update.max_tokens_per_micro_batch: {budget:,})."
    )
    if step.row_tokens > budget:
        yield remark(
            f"A prompt and its completion can have {step.row_tokens:,} tokens, more than the "
            f"budget of {budget:,}: such a row gets a micro-batch of its own. To bound memory "
            "lower model.sampling.max_tokens or data.max_prompt_tokens."
        )
    if update.minibatches > len(step.prompt_lengths):
        yield remark(
            f"A process has {len(step.prompt_lengths)} groups per rollout step, too few for "
            f"{update.minibatches} minibatches. Lower model.update.minibatches."
        )


def _length(run: BuiltRun) -> Iterator[Finding]:
    """Yield findings on how long an epoch and the run are."""
    trainer, loader = run.trainer, run.loader.or_none()
    name = "rollout steps" if run.grpo else "batches"
    num_steps = planned_steps(run)
    words = []
    if loader is not None:
        left_out = _left_out(loader)
        words.append(
            f"an epoch of {loader.num_prompts:,} prompts has {len(loader):,} {name}{left_out}"
        )
        if num_steps is not None:
            words.append(f"the run has {num_steps:,} ({num_steps / len(loader):.3g} epochs)")
    elif num_steps is not None:
        words.append(f"the run has {num_steps:,} {name}")
    if words:
        text = "; ".join(words)
        yield ok(f"{text[0].upper()}{text[1:]}.")
    if run.module.lr_schedule != "constant" and not has_step_limit(trainer):
        run.module.num_optimizer_steps()  # raises what fit would
    if limit := zero_limit(trainer):
        yield remark(f"Nothing would be trained: trainer.{limit} is 0.")
    elif is_endless(trainer):
        yield remark(
            "The run has no end: stop it with Ctrl-C, or set trainer.max_steps (optimizer steps) "
            "or trainer.max_epochs."
        )


def _left_out(loader: TrainingLoader) -> str:
    """Return a note on prompts that an epoch leaves out; a mixture uses them in the next one."""
    if not isinstance(loader, PromptLoader):
        return ""
    rest = loader.num_prompts % loader.batch_size
    if not rest:
        return ""
    which = "others in each" if loader.shuffle else "the same in each"
    return f", which {'leaves' if len(loader) == 1 else 'leave'} out {rest:,} ({which})"


def planned_steps(run: BuiltRun) -> int | None:
    """Return the rollout steps of the run (for SFT: batches); None if it has no end."""
    trainer, loader = run.trainer, run.loader.or_none()
    by_steps = run.module.num_batches(trainer.max_steps) if trainer.max_steps > 0 else None
    by_epochs: int | None = None
    if loader is not None and (trainer.max_epochs or -1) > 0:
        by_epochs = trainer.max_epochs * len(loader)
    return min((one for one in (by_steps, by_epochs) if one is not None), default=None)


def check_callbacks(run: BuiltRun) -> Iterator[Finding]:
    """Check the metrics that callbacks watch, and say when checkpoints are written."""
    held_out = run.val_prompts
    if (loader := run.loader.or_none()) is not None:
        check_monitors(run.module, run.module.evaluation, held_out)
        warn_if_never_checked(
            run.trainer,
            num_steps=planned_steps(run) or math.inf,
            per_epoch=len(loader),
            has_validation=bool(held_out),
        )
    yield _checkpoints(run, has_best=bool(held_out))


def _checkpoints(run: BuiltRun, *, has_best: bool) -> Finding:
    callback: Any = run.checkpoints
    if callback is None:
        return remark(
            "No checkpoints: a run that is stopped cannot be resumed. Set "
            "trainer.enable_checkpointing to true."
        )
    num_steps = planned_steps(run)
    intervals = []
    if callback.every_n_steps is not None:
        times = f" ({num_steps // callback.every_n_steps:,} in all)" if num_steps else ""
        intervals.append(f"every {several(callback.every_n_steps, 'step')}{times}")
    if callback.every_n_seconds is not None:
        intervals.append(f"every {callback.every_n_seconds / 60:g} minutes")
    if intervals:
        intervals = ["after the first step", *intervals]
    best = f", and the best by {callback.monitor}" if callback.monitor and has_best else ""
    when = ", ".join(intervals) + (" and " if intervals else "") + "at the end"
    return ok(f"Checkpoints {when}; the last {callback.keep_last} are kept{best}.")


def several(number: int, name: str, plural: str = "") -> str:
    """Return ``1 step`` or ``2 steps``."""
    return f"1 {name}" if number == 1 else f"{number:,} {plural or name + 's'}"
