"""The arithmetic of a rollout step: prompts, completions, micro-batches, steps, checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_grpo.cli.doctor.findings import Finding, ok, remark
from lit_grpo.cli.doctor.subject import Subject
from lit_grpo.runs.trainer import refuse_automatic
from lit_grpo.training.batching import UpdateConfig, added_tokens, micro_batches
from lit_grpo.training.compatibility import refuse_unsupported, warn_of_warm_up
from lit_grpo.training.unused_settings import settings_without_effect
from lit_grpo.types import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizes of a rollout step of one process, if every completion is as long as allowed.

    In a warm-up a step is a batch, and each prompt has one completion.
    """

    num_ranks: int
    prompt_lengths: tuple[int, ...]
    """Tokens of the prompts of a process, the longest first."""
    completion_tokens: int
    group_size: int
    optimizer_steps: int
    micro_batches: int
    """Of an optimizer step."""
    micro_batch_tokens: int
    """Tokens that the model reads in the largest micro-batch, padding included."""
    micro_batch_rows: int
    """Completions in the largest micro-batch."""

    @property
    def num_rows(self) -> int:
        return len(self.prompt_lengths) * self.group_size

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest prompt and completion together."""
        return self.prompt_lengths[0] + self.completion_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of a step over all processes, each prompt counted once."""
        own = sum(self.prompt_lengths) + self.num_rows * self.completion_tokens
        return self.num_ranks * own


def make_plan(subject: Subject) -> Plan:
    """Return the sizes of the largest step that the data and the settings allow."""
    num_ranks: int = subject.trainer.world_size
    num_prompts: int = max(1, subject.cli.datamodule.prompts_per_step // num_ranks)
    lengths = subject.prompt_lengths[:num_prompts]
    lengths += [lengths[-1]] * (num_prompts - len(lengths))
    grpo = subject.grpo
    group_size, update = (grpo.group_size, grpo.update) if grpo else (1, UpdateConfig())
    num_parts = min(update.minibatches, num_prompts)
    largest = lengths[: math.ceil(num_prompts / num_parts)]
    sizes = (largest, group_size, subject.completion_tokens)
    packed = subject.module.policy.packing
    budget = update.max_tokens_per_micro_batch
    parts = split(*sizes, budget, packed=packed) if grpo else split(*sizes, None, packed=packed)
    tokens = [count_tokens(part, largest, *sizes[1:], packed=packed) for part in parts]
    return Plan(
        num_ranks=num_ranks,
        prompt_lengths=tuple(lengths),
        completion_tokens=subject.completion_tokens,
        group_size=group_size,
        optimizer_steps=update.epochs * num_parts,
        micro_batches=len(parts),
        micro_batch_tokens=max(tokens),
        micro_batch_rows=max(map(len, parts)),
    )


def split(
    prompts: list[int], group_size: int, completion_tokens: int, budget: int | None, *, packed: bool
) -> list[Tensor]:
    """Return the rows of each micro-batch of an optimizer step, as training forms them.

    Args:
        prompts: Tokens of each prompt.
        budget: Tokens of a micro-batch; None for a single one.
    """
    num_rows = len(prompts) * group_size
    rows = torch.arange(num_rows)
    if budget is None:
        return [rows]
    lengths = torch.tensor(prompts)
    prompt_mask = torch.arange(max(prompts)) < lengths[:, None]
    # Of one element, however many completions there are.
    completions = torch.ones(1, 1, dtype=torch.bool).expand(num_rows, completion_tokens)
    batch = TokenBatch(
        prompt_ids=prompt_mask.long(),
        prompt_mask=prompt_mask,
        prompt_index=rows // group_size,
        completion_ids=completions,
        completion_mask=completions,
    )
    return micro_batches(batch, rows, budget, packed=packed)


def count_tokens(
    rows: Tensor, prompts: list[int], group_size: int, completion_tokens: int, *, packed: bool
) -> int:
    """Return how many tokens the model reads for these rows: a pack shares prompts."""
    indices: list[int] = (rows // group_size).tolist()
    if packed:
        completions = torch.tensor([completion_tokens])
        return sum(
            prompts[index]
            + completion_tokens
            + (count - 1) * int(added_tokens(torch.tensor([prompts[index]]), completions))
            for index, count in Counter(indices).items()
        )
    return len(rows) * (max(prompts[index] for index in indices) + completion_tokens)


def check_batch(subject: Subject) -> Iterator[Finding]:
    """Say in words what a step consists of, and how many there are."""
    refuse_unsupported(subject.trainer)
    refuse_automatic(subject.trainer, subject.module)
    plan = make_plan(subject)
    if subject.grpo:
        grpo = subject.grpo
        for message in settings_without_effect(grpo.objective, grpo.advantage, grpo.update):
            yield remark(message)
    yield ok(_sizes(plan, subject))
    if subject.grpo:
        yield from _updates(plan, subject.grpo.update)
    yield from _length(subject)
    yield _checkpoints(subject)
    warn_of_warm_up(subject.trainer, subject.module.warmup_steps)


def _sizes(plan: Plan, subject: Subject) -> str:
    num_prompts = len(plan.prompt_lengths)
    total = plan.num_ranks * num_prompts
    each = "" if plan.num_ranks == 1 else f", on {plan.num_ranks} processes with {num_prompts} each"
    if subject.grpo is None:
        rows = f"{total:,} prompts with their targets per batch{each}"
    else:
        rows = (
            f"{total:,} prompts x {plan.group_size} completions (model.group_size) = "
            f"{total * plan.group_size:,} completions per rollout step{each}"
        )
    return (
        f"{rows}; at most {plan.num_tokens:,} tokens: prompts of up to {plan.prompt_lengths[0]:,}, "
        f"completions of up to {plan.completion_tokens:,}."
    )


def _updates(plan: Plan, update: UpdateConfig) -> Iterator[Finding]:
    budget = update.max_tokens_per_micro_batch
    steps = several(plan.optimizer_steps, "optimizer step")
    parts = several(plan.micro_batches, "micro-batch", "micro-batches")
    yield ok(
        f"{steps} per rollout step, each from at most {parts} of up to "
        f"{plan.micro_batch_tokens:,} tokens (model.update.max_tokens_per_micro_batch: {budget:,})."
    )
    if plan.row_tokens > budget:
        yield remark(
            f"A prompt and its completion can have {plan.row_tokens:,} tokens, more than the "
            f"budget of {budget:,}: such a row gets a micro-batch of its own. To bound memory "
            "lower model.sampling.max_tokens or data.max_prompt_tokens."
        )
    if update.minibatches > len(plan.prompt_lengths):
        yield remark(
            f"A process has {len(plan.prompt_lengths)} groups per rollout step, too few for "
            f"{update.minibatches} minibatches. Lower model.update.minibatches."
        )


def _length(subject: Subject) -> Iterator[Finding]:
    """Say how long an epoch and the run are."""
    trainer, loader = subject.trainer, subject.loader.or_none()
    name = "rollout steps" if subject.grpo else "batches"
    num_steps = planned_steps(subject)
    words = []
    if loader is not None:
        words.append(f"an epoch of {len(loader.prompts):,} prompts has {len(loader):,} {name}")
        if num_steps is not None:
            words.append(f"the run has {num_steps:,}, {num_steps / len(loader):.3g} epochs")
    elif num_steps is not None:
        words.append(f"the run has {num_steps:,} {name}")
    if words:
        text = "; ".join(words)
        yield ok(f"{text[0].upper()}{text[1:]}.")
    if trainer.max_steps <= 0 and (trainer.max_epochs or -1) < 0:
        if subject.module.lr_schedule != "constant":
            subject.module.num_optimizer_steps()  # raises what fit would
        yield remark(
            "The run has no end: stop it with Ctrl-C, or set trainer.max_steps (optimizer steps) "
            "or trainer.max_epochs."
        )


def planned_steps(subject: Subject) -> int | None:
    """Return the rollout steps of the run, in SFT batches; None if it has no end."""
    trainer, loader = subject.trainer, subject.loader.or_none()
    by_steps = subject.module.num_batches(trainer.max_steps) if trainer.max_steps > 0 else None
    by_epochs: int | None = None
    if loader is not None and (trainer.max_epochs or -1) > 0:
        by_epochs = trainer.max_epochs * len(loader)
    return min((one for one in (by_steps, by_epochs) if one is not None), default=None)


def _checkpoints(subject: Subject) -> Finding:
    callback: Any = subject.checkpoints
    if callback is None:
        return remark(
            "No checkpoints: a run that is stopped cannot be resumed. Set "
            "trainer.enable_checkpointing to true."
        )
    num_steps = planned_steps(subject)
    intervals = []
    if callback.every_n_steps is not None:
        times = f" ({num_steps // callback.every_n_steps:,} in all)" if num_steps else ""
        intervals.append(f"every {several(callback.every_n_steps, 'step')}{times}")
    if callback.every_n_seconds is not None:
        intervals.append(f"every {callback.every_n_seconds / 60:g} minutes")
    best = f", and the best by {callback.monitor}" if callback.monitor else ""
    when = ", ".join(intervals) + (" and " if intervals else "") + "at the end"
    return ok(f"Checkpoints {when}; the last {callback.keep_last} are kept{best}.")


def several(number: int, name: str, plural: str = "") -> str:
    """Return ``1 step`` or ``2 steps``."""
    return f"1 {name}" if number == 1 else f"{number:,} {plural or name + 's'}"
