"""Measure what sampling during the update saves: a step with it against a step without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from _benchmark.parts import as_prompts, loaded_policy
from _benchmark.processes import Repetitions
from _benchmark.results import Result
from _benchmark.workloads import SIZES, WORKLOADS, ModelSize, Workload

OVERLAP_TARGET = 0.65
WARM_UP_STEPS = 2
NUM_TOKENS = SIZES["tiny"].vocab_size
"""The smallest vocabulary, so that every model knows these token ids."""


def compare_overlap(size: ModelSize, repetitions: Repetitions) -> Iterator[Result]:
    """Compare steps whose generation takes as long as the update, as on a device of its own."""
    workload = replace(WORKLOADS["short_equal"], num_prompts=8)
    num_steps = WARM_UP_STEPS + repetitions.num_steps
    update = median(step_seconds(workload, size, sleeping_engine(0.0), 0, num_steps))
    synchronous, overlapping = (
        step_seconds(workload, size, sleeping_engine(update), ahead, num_steps) for ahead in (0, 1)
    )
    yield Result(
        figure="overlap",
        case="generation and update equally long, max_head_offpolicyness 1",
        against="the same with 0",
        ours=median(overlapping),
        other=median(synchronous),
        unit="s",
        target=OVERLAP_TARGET,
        details={"": {"update (s)": update}},
    )


def step_seconds(
    workload: Workload, size: ModelSize, engine: Any, ahead: int, num_steps: int
) -> list[float]:
    """Return the seconds of each training step after the warm-up; all but the engine is real."""
    from lit_grpo.policy import Policy
    from lit_grpo.rollout import Sampling
    from lit_grpo.training import Evaluation, GRPOModule

    with TemporaryDirectory() as directory:
        loaded_policy(workload, size).save_pretrained(directory)
        module = GRPOModule(
            Policy(path=directory),
            [reward_of_tokens()],
            group_size=workload.group_size,
            sampling=Sampling(max_tokens=workload.max_tokens),
            engine=engine,
            max_head_offpolicyness=ahead,
            evaluation=Evaluation(before_training=False),
        )
        timer = StepEndTimer()
        trainer = L.Trainer(
            max_steps=num_steps, accelerator="auto", devices=1, callbacks=[timer], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, prompt_loader(workload))
        module.close()
    return timer.seconds[WARM_UP_STEPS:]


class StepEndTimer(L.Callback):
    """Record the seconds from the end of each step to the end of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        if self._last:
            self.seconds.append(now - self._last)
        self._last = now


def prompt_loader(workload: Workload) -> Any:
    from lit_grpo.data.loading.loader import PromptLoader

    ids = torch.randint(2, NUM_TOKENS, (workload.num_prompts, workload.prompt_tokens))
    return PromptLoader(as_prompts(ids), workload.num_prompts)


def reward_of_tokens() -> Any:
    from lit_grpo.rewards import Reward

    class Parity(Reward):
        """Differ between completions, at no cost."""

        def score(self, prompt: Any, completion: Any) -> float:
            return float(completion.token_ids[0] % 2)

    return Parity()


def sleeping_engine(seconds: float) -> Any:
    """Return an engine that sleeps, as if it sampled on another device, and draws at random."""
    from lit_grpo.rollout import RolloutEngine
    from lit_grpo.types import Completion

    class SleepingEngine(RolloutEngine):
        overlaps_updates = True

        def load_weights(self, policy: Any, version: int) -> None:
            self.version = version

        def generate(self, prompts: Any, group_size: int, sampling: Any, *, seed: int) -> Any:
            version, size = self.version, (len(prompts) * group_size, sampling.max_tokens)
            time.sleep(seconds)
            noise = torch.Generator().manual_seed(seed)
            drawn = torch.randint(2, NUM_TOKENS, size, generator=noise)
            for row, tokens in enumerate(drawn.tolist()):
                yield (
                    row,
                    Completion(
                        token_ids=tuple(tokens),
                        sampler_logprobs=(-7.0,) * len(tokens),
                        text="",
                        finish_reason="stop",
                        policy_versions=(version,) * len(tokens),
                    ),
                )

    return SleepingEngine()
