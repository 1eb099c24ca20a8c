"""Train with a judge that fails 30% of its calls and is down for five attempts at one step, then
check in the run's files that no reward was invented: `python scripts/failing_judge.py`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import pandas as pd
import torch
from _checks import Checks, print_checks, read_run
from _tiny_model import TINY_LLAMA
from _toy_judge import MAX_GRADE, ToyJudge, grade, toy_judge

from lit_grpo.data import AdditionData
from lit_grpo.judge import Judge, Limits
from lit_grpo.policy import Policy
from lit_grpo.rewards import JudgeReward
from lit_grpo.rollout import Sampling
from lit_grpo.runs.files.completions import CompletionsFile
from lit_grpo.runs.files.metrics import MetricsFile
from lit_grpo.stopping import get_stop_reason
from lit_grpo.training import Evaluation, GRPOModule, OutagePolicy

FAILURE_RATE = 0.3
NUM_ATTEMPTS_DOWN = 5
ABSENT = ["score/judge", "reward", "advantage"]


class Outage(L.Callback, logging.Handler):
    """Take the judge down when a step begins, and up again after `NUM_ATTEMPTS_DOWN` attempts."""

    def __init__(self, judge: ToyJudge, step: int) -> None:
        logging.Handler.__init__(self)
        self._judge = judge
        self._step = step
        self.num_attempts = 0
        self.weights_before: list[torch.Tensor] = []
        self.weights_after: list[torch.Tensor] = []

    def on_stage_start(self, trainer: L.Trainer, module: Any, name: str) -> None:
        if module.rollout_step != self._step:
            return
        if name == "generation":
            self.weights_before = copy_weights(module)
            self._judge.set(is_down=True)
        elif name == "logprob":
            self.weights_after = copy_weights(module)

    def emit(self, record: logging.LogRecord) -> None:
        if "Too many scores are missing" in record.getMessage():
            self.num_attempts += 1
            if self.num_attempts == NUM_ATTEMPTS_DOWN:
                self._judge.set(is_down=False)


def copy_weights(module: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.policy.model.parameters()]


@dataclass(frozen=True, kw_only=True)
class RunOutput:
    """What a run has left behind."""

    completions: pd.DataFrame
    metrics: pd.DataFrame
    num_attempts: int
    """At the step at which the judge was down."""
    weights_before: list[torch.Tensor]
    weights_after: list[torch.Tensor]
    num_optimizer_steps: int
    stop_reason: str
    calls: dict[str, int]


def train(run_dir: Path, num_steps: int) -> RunOutput:
    """Train shortly with a judge that fails; its pauses are shorter than a real one's."""
    with toy_judge(failure_rate=FAILURE_RATE) as judge:
        outage = Outage(judge, step=num_steps // 2)
        gate_log = logging.getLogger("lit_grpo.training.collecting.score_gate")
        gate_log.addHandler(outage)
        module = make_module(judge.url)
        trainer = L.Trainer(
            max_steps=num_steps,
            accelerator="cpu",
            logger=MetricsFile(run_dir),
            callbacks=[outage, CompletionsFile(run_dir)],
            enable_checkpointing=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            limit_val_batches=0,
        )
        try:
            trainer.fit(module, AdditionData(num_digits=1, validation_size=8, prompts_per_step=8))
        finally:
            module.close()
            gate_log.removeHandler(outage)
        reason = get_stop_reason(trainer)
        return RunOutput(
            **read_run(run_dir),
            num_attempts=outage.num_attempts,
            weights_before=outage.weights_before,
            weights_after=outage.weights_after,
            num_optimizer_steps=trainer.global_step,
            stop_reason=reason.message if reason else "",
            calls=judge.counts(),
        )


def make_module(url: str) -> GRPOModule:
    limits = Limits(max_concurrency=32, num_retries=1, call_timeout_seconds=10)
    judge = Judge(model="toy", base_url=f"{url}/v1", auth="none", limits=limits)
    return GRPOModule(
        Policy(architecture=TINY_LLAMA),
        [JudgeReward(judge)],
        group_size=4,
        sampling=Sampling(max_tokens=3),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        outage=OutagePolicy(first_pause_seconds=0.2, give_up_after_seconds=30),
        evaluation=Evaluation(before_training=False),
    )


def check_run(run: RunOutput, num_steps: int) -> Checks:
    """Return all statements about a run, each with whether it holds."""
    rows = run.completions
    scores = rows["score/judge"]
    absent = rows["outcome/judge"] != "ok"
    truth = rows.completion.map(grade) / MAX_GRADE
    right = (scores == truth)[~absent]
    pairs = zip(run.weights_before, run.weights_after, strict=True)
    failed = {kind: count for kind, count in run.calls.items() if kind != "verdict"}
    outcomes = rows["outcome/judge"][absent].value_counts().to_dict()
    return {
        "calls failed": (
            sum(failed.values()) > FAILURE_RATE / 2 * sum(run.calls.values()),
            f"{sum(failed.values())} of {sum(run.calls.values())}: {describe_counts(failed)}",
        ),
        "every score is the judge's": (
            bool(right.all()),
            f"{right.sum()} of {len(rows)} rows have one",
        ),
        "no zero was invented": (
            bool(not (scores == 0).any() and truth.min() > 0),
            f"{(scores == 0).sum()} zeros, the lowest grade is {truth.min():.1f}",
        ),
        "an absent score has no reward and no advantage": (
            bool(absent.any() and rows[absent][ABSENT].isna().to_numpy().all()),
            f"{absent.sum()} rows: {describe_counts(outcomes)}",
        ),
        "the policy learned": (
            run.metrics["reward/mean"].tail(3).mean() > run.metrics["reward/mean"][0],
            " → ".join(f"{run.metrics['reward/mean'].iloc[i]:.2f}" for i in (0, -1)),
        ),
        "the outage was waited out": (
            run.num_attempts >= NUM_ATTEMPTS_DOWN,
            f"{run.num_attempts} attempts at the step",
        ),
        "the outage did not change the policy": (
            bool(run.weights_after) and all(torch.equal(*pair) for pair in pairs),
            "weights are bit-identical",
        ),
        "the run made all its steps": (
            run.num_optimizer_steps == len(run.metrics) == num_steps and not run.stop_reason,
            run.stop_reason or f"{run.num_optimizer_steps} optimizer steps",
        ),
    }


def describe_counts(kinds: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python scripts/failing_judge.py", description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    num_steps = parser.parse_args().steps
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        return print_checks(check_run(train(Path(directory), num_steps), num_steps))


if __name__ == "__main__":
    sys.exit(main())
