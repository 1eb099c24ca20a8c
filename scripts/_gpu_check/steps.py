"""Run GRPO steps, check that they train, and measure what each of their stages takes."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import lightning as L
import torch
from _gpu_check.device import Device
from _gpu_check.findings import Recorder
from _gpu_check.sizes import CheckSize
from _gpu_check.utilisation import FORMULA, peak_tflops, update_flop
from lightning.pytorch.strategies import Strategy

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.policy import Policy
from lit_grpo.rewards import Reward
from lit_grpo.rollout import Sampling
from lit_grpo.training import Evaluation, GRPOModule, UpdateConfig

NUM_STEPS = 20
NUM_WARM_UP = 3
MFU_AIM = 0.45
"""Of the larger model."""
RESERVE_SECONDS = 40
"""Left for the measurements after the steps."""

StageContext = Callable[[str], AbstractContextManager[Any]]
"""Name of a stage -> the context in which it runs."""


class ShareOfLowTokens(Reward):
    """Reward tokens of the lower half of the vocabulary, which random weights sample half the time.

    Its rise within a few steps shows that the update moves the policy the right way.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._half = vocab_size // 2

    def score(self, prompt: Any, completion: Any) -> float:
        return fmean(token < self._half for token in completion.token_ids)


@dataclass(kw_only=True)
class Step:
    """What one step took and gave."""

    seconds: float = 0.0
    stages: Counter[str] = field(default_factory=Counter)
    """Name of a stage -> its seconds."""
    peak_gb: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class Observer(L.Callback):
    """Time the stages of each step, and run those of some steps in a context.

    Args:
        contexts: Number of a step -> the context of its stages.
        may_go_on: Asked after each step.
    """

    def __init__(
        self, device: Device, contexts: Mapping[int, StageContext], may_go_on: Callable[[], bool]
    ) -> None:
        self.steps: list[Step] = []
        self._device = device
        self._contexts = contexts
        self._may_go_on = may_go_on
        self._stack = ExitStack()
        self._current = Step()

    def on_train_batch_start(self, *_: Any) -> None:
        self._device.synchronize()
        self._current, self._start = Step(), time.perf_counter()

    def on_stage_start(self, trainer: L.Trainer, module: L.LightningModule, name: str) -> None:
        if name == "micro_batch":
            return
        self._device.take_peak_gb()
        if context := self._contexts.get(len(self.steps)):
            self._stack.enter_context(context(name))

    def on_stage_end(self, trainer: L.Trainer, module: L.LightningModule, stage: Any) -> None:
        if stage.micro_batch is not None:
            return
        self._stack.close()
        self._current.stages[stage.name] += stage.seconds
        if (peak := self._device.take_peak_gb()) is not None:
            self._current.peak_gb[stage.name] = peak

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self._device.synchronize()
        step, rollouts = self._current, outputs["rollouts"]
        step.seconds = time.perf_counter() - self._start
        step.metrics = outputs["metrics"]
        step.num_prompt_tokens = sum(len(group.prompt.token_ids) for group in rollouts.groups)
        step.num_completion_tokens = sum(len(one.token_ids) for one in rollouts.completions)
        self.steps.append(step)
        if not self._may_go_on():
            trainer.should_stop = True


def make_module(
    size: CheckSize, optimizer: Callable[..., Any] = torch.optim.AdamW, **policy: Any
) -> GRPOModule:
    workload = size.workload
    return GRPOModule(
        Policy(architecture=size.architecture, **policy),
        [ShareOfLowTokens(size.model.vocab_size)],
        group_size=workload.group_size,
        sampling=Sampling(max_tokens=workload.max_tokens),
        update=UpdateConfig(max_tokens_per_micro_batch=size.max_tokens_per_micro_batch),
        optimizer=partial(optimizer, lr=size.learning_rate, weight_decay=0.0),
        evaluation=Evaluation(before_training=False),
    )


def train(
    device: Device,
    size: CheckSize,
    observer: Observer,
    num_steps: int,
    *,
    strategy: str | Callable[[], Strategy] | None = None,
    **settings: Any,
) -> GRPOModule:
    """Train for some steps; the observer keeps what they gave.

    Args:
        settings: Of the module, as for `make_module`.
    """
    module = make_module(size, **settings)
    options = dict(device.trainer_options)
    if strategy is not None:
        options["strategy"] = strategy() if callable(strategy) else strategy
    trainer = L.Trainer(
        max_steps=num_steps,
        precision=device.precision,
        callbacks=[observer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    num_prompts = size.workload.num_prompts
    trainer.fit(module, PromptLoader(size.prompts(4 * num_prompts), num_prompts))
    return module


def judge(recorder: Recorder, steps: list[Step], *, has_stopped_early: bool) -> None:
    """Record whether the steps have trained the policy."""
    rewards = [step.metrics["reward/mean"] for step in steps]
    if has_stopped_early:
        recorder.skip(f"{NUM_STEPS} steps", f"the time ran out after {len(steps)}.")
    else:
        recorder.state(f"{NUM_STEPS} steps", len(steps) == NUM_STEPS, f"{len(steps)} were made.")
    values = {name: [s.metrics.get(name, math.nan) for s in steps] for name in STEADY_METRICS}
    wrong = {k: v for k, v in values.items() if not all(map(math.isfinite, v))}
    recorder.state("loss and gradient are finite", not wrong, str(wrong or ""))
    skipped = max(step.metrics["policy/skipped_fraction"] for step in steps)
    recorder.decide("skipped optimizer steps", skipped, 0.0, "no gradient may be NaN or infinite.")
    part = max(1, len(rewards) // 4)
    first, last = fmean(rewards[:part]), fmean(rewards[-part:])
    if has_stopped_early:
        recorder.skip("the reward rises", "there were too few steps.")
    else:
        recorder.state("the reward rises", last > first, f"from {first:.4f} to {last:.4f}")
    recorder.decide(
        "sampler against trainer, mean difference of a logprob",
        max(step.metrics["sampler/logprob_difference_mean"] for step in steps),
        SAMPLER_LIMIT,
        "both round to bfloat16, token by token and in packs.",
    )
    recorder.figure("reward, first step", rewards[0], "")
    recorder.figure("reward, last step", rewards[-1], "")


STEADY_METRICS = ("policy/loss", "policy/grad_norm", "policy/entropy")
SAMPLER_LIMIT = 0.05


def record_figures(
    recorder: Recorder, steps: list[Step], device: Device, size: CheckSize, case: str = ""
) -> None:
    """Record medians over steps, and what the first and the last of them gave.

    Args:
        case: Beginning of the names of the figures.
    """

    def record(name: str, value: float | None, unit: str, how: str = "") -> None:
        recorder.figure(f"{case}{name}", value, unit, how)

    stage = {key: median(step.stages[key] for step in steps) for key in ("generation", "update")}
    prompt_tokens = median(step.num_prompt_tokens for step in steps)
    sampled = median(step.num_completion_tokens for step in steps)
    how = f"median of {len(steps)} steps"
    record("step", median(step.seconds for step in steps), "s", how)
    for key, value in stage.items():
        record(key, value, "s", how)
    rest = median(step.seconds - sum(step.stages.values()) for step in steps)
    record("outside of all stages", rest, "s", how)
    record("generation", sampled / stage["generation"], "tokens/s", "sampled tokens")
    tokens = prompt_tokens + sampled
    record("update", tokens / stage["update"], "tokens/s", "a prompt counts once a group")
    flop = update_flop(size.model, int(prompt_tokens), int(sampled))
    record("update", flop / stage["update"] / 1e12, "TFLOP/s", FORMULA)
    peak = peak_tflops(device.title)
    known = f"peak of {peak:g} TFLOP/s for" if peak else "no peak is known for"
    mfu = peak and flop / stage["update"] / peak / 1e12
    aim = f"; aim: at least {MFU_AIM}" if case else ""
    record("MFU of the update", mfu, "", f"{known} {device.title}{aim}")
    for key in ("generation", "update"):
        peaks = [step.peak_gb[key] for step in steps if key in step.peak_gb]
        record(f"peak memory, {key}", max(peaks, default=None), "GiB")
