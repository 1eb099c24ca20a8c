"""Measure the time of rewards: calls to a judge against the least that they can take, and the
share of judging that generation hides. The judge is a process of its own with a fixed latency.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _benchmark.parts import as_prompts, loaded_policy, random_ids
from _benchmark.processes import Repetitions
from _benchmark.results import Result
from _benchmark.workloads import WORKLOADS, ModelSize

sys.path.append(str(Path(__file__).parent.parent))
from _toy_judge import ToyJudge, toy_judge

NUM_CALLS = 64
CALLS_TARGET = 1.15
EXPOSED_TARGET = 0.15
EXPOSED_CONCURRENCY = (8, 16)
CASES = [(0.25, 8), (0.5, 16), (1.0, 32)]
"""(seconds per call, calls at a time)"""


def compare_calls(repetitions: Repetitions) -> Iterator[Result]:
    """Compare 64 calls with 64 L / c, the time of c calls at a time of L seconds each."""
    for latency, concurrency in CASES:
        with toy_judge(latency=latency) as judge:
            seconds = [judging_seconds(judge, concurrency) for _ in range(repetitions.rounds)]
        yield Result(
            figure="reward calls",
            case=f"{NUM_CALLS} calls of {latency} s, {concurrency} at a time",
            against="calls x latency / concurrency",
            ours=median(seconds),
            other=NUM_CALLS * latency / concurrency,
            unit="s",
            target=CALLS_TARGET,
        )


def judging_seconds(judge: ToyJudge, concurrency: int) -> float:
    """Return the seconds in which a started suite judges all completions at once."""
    from lit_grpo.types import Completion, Prompt

    prompts = [Prompt(id=str(n), text=f"{n}+1=", token_ids=(1,)) for n in range(NUM_CALLS // 8)]
    completions = [
        [
            Completion(token_ids=(1,), sampler_logprobs=(0.0,), text=f"{n}", finish_reason="stop")
            for n in range(8)
        ]
        for _ in prompts
    ]
    before = num_calls(judge)
    with started_suite(judge, concurrency) as suite:
        start = time.perf_counter()
        rollouts = suite.score(prompts, completions)
        seconds = time.perf_counter() - start
    assert rollouts.valid.all()
    assert num_calls(judge) - before == NUM_CALLS + 1  # one more at the start, to see it answer
    return seconds


def num_calls(judge: ToyJudge) -> int:
    return sum(judge.counts().values())


def started_suite(judge: ToyJudge, concurrency: int) -> Any:
    from lit_grpo.judge import Judge, Limits
    from lit_grpo.rewards import JudgeReward
    from lit_grpo.rewards.scoring.suite import RewardSuite

    limits = Limits(max_concurrency=concurrency)
    reward = JudgeReward(Judge(model="toy", base_url=f"{judge.url}/v1", auth="none", limits=limits))
    suite = RewardSuite([reward])
    suite.start()
    return suite


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step, and of judging its completions once more."""

    generation: float
    exposed: float
    """The wait for scores after generation."""
    judging: float
    """Judging all completions at once, without generation."""


def compare_exposed(size: ModelSize, repetitions: Repetitions) -> Iterator[Result]:
    """Compare the wait for scores after generation with the time that judging takes by itself.

    Judging takes as long as generation. With c of N completions judged at a time the ratio is at
    least c / N, since the last completion is judged after all generation.
    """
    workload = replace(WORKLOADS["short_varied"], num_prompts=16)
    policy = loaded_policy(workload, size)
    for concurrency in EXPOSED_CONCURRENCY:
        with toy_judge() as judge, started_suite(judge, concurrency) as suite:
            steps = []
            for seed in range(1, 2 + repetitions.rounds):  # the first is a warm-up
                judge.set(latency=0.0)
                seconds = time_step(policy, workload, suite, seed).generation
                judge.set(latency=concurrency * seconds / workload.num_rows)
                steps.append(time_step(policy, workload, suite, seed))
        yield Result(
            figure="reward exposed",
            case=f"{workload.num_rows} completions, {concurrency} judged at a time",
            against="judging by itself",
            ours=median(one.exposed for one in steps[1:]),
            other=median(one.judging for one in steps[1:]),
            unit="s",
            target=EXPOSED_TARGET,
            details={"": {"generation (s)": median(one.generation for one in steps[1:])}},
        )


def time_step(policy: Any, workload: Any, suite: Any, seed: int) -> StepSeconds:
    """Generate and score as a training step does."""
    from lit_grpo.rollout import HFEngine, Sampling

    engine = HFEngine(max_concurrent=32)
    engine.load_weights(policy, 0)
    torch.manual_seed(0)
    prompts = as_prompts(random_ids(policy, workload))
    sampling = Sampling(max_tokens=workload.max_tokens)
    scoring = suite.open(prompts, workload.group_size)
    start = time.perf_counter()
    for row, completion in engine.generate(prompts, workload.group_size, sampling, seed=seed):
        scoring.add(row, completion)
    generated = time.perf_counter()
    rollouts = scoring.result()
    scored = time.perf_counter()
    suite.score(prompts, [group.completions for group in rollouts.groups])
    return StepSeconds(
        generation=generated - start,
        exposed=scored - generated,
        judging=time.perf_counter() - scored,
    )
