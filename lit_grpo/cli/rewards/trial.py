"""Run ``lit-grpo rewards``: sample and score a few completions without training.

It shows the signal of the rewards, and projects the time and cost of a rollout step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from lit_grpo.cli.errors import print_error
from lit_grpo.cli.rewards.failures import (
    REWARD_FAILED,
    failed_everywhere,
    find_unreported,
    report_failures,
)
from lit_grpo.diagnostics.absent_scores import find_failure, never_scored
from lit_grpo.diagnostics.step_findings import no_signal, truncated_fraction
from lit_grpo.judge.estimate import seconds_of_calls
from lit_grpo.objective.advantages import group_deviation
from lit_grpo.rewards import JudgedReward, Reward
from lit_grpo.rewards.scoring.valid_rows import weighted_names
from lit_grpo.runs.files.completions import completions_table, free_path, write_table
from lit_grpo.runs.tables import add_numbers, make_table, open_console
from lit_grpo.stopping import ExitCode
from lit_grpo.training import GRPOModule
from lit_grpo.training.collecting.checked_engine import generate
from lit_grpo.training.collecting.score_status import score_status
from lit_grpo.training.seeds import SeedPurpose
from lit_grpo.types import Measurements, Prompt, RolloutBatch, Score

LATENCY = "timing/judge_api_latency_s"
TOKENS = ("judge/prompt_tokens", "judge/completion_tokens")

ASSUMPTIONS = (
    '"per step" is a projection to {num_rows} completions on one process. It assumes that judges '
    "are as fast as in this trial and get limits.max_concurrency calls at a time within their "
    "per-minute limits (rewards that share a judge add up); that other async rewards score as many "
    "completions at once as in this trial, within their p95; and that sync rewards score one "
    "completion at a time. Worker start-up is included; part of this time overlaps with generation."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The scored completions of a trial, with the time that they took."""

    rollouts: RolloutBatch
    generation_seconds: float
    measurements: Mapping[str, Measurements]
    """Name of a reward -> its measurements."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Source of a mixture -> its share of a rollout step, which differs from the trial's."""

    @property
    def num_rows(self) -> int:
        return self.rollouts.rewards.numel()

    def scores_of(self, reward: Reward) -> list[Score]:
        """Return the scores of the completions that a reward was asked for."""
        scores = [score for group in self.rollouts.groups for score in group.scores[reward.name]]
        return [score for score in scores if score.is_for_source]

    def num_scored(self, reward: Reward, num_rows: int) -> float:
        """Return for how many completions of a rollout step of ``num_rows`` a reward is asked."""
        if self.shares and reward.only_sources is not None:
            return num_rows * sum(self.shares.get(one, 0.0) for one in reward.only_sources)
        return num_rows * len(self.scores_of(reward)) / self.num_rows


def try_rewards(
    module: GRPOModule,
    prompts: Sequence[Prompt],
    *,
    num_rows_per_step: int,
    shares: Mapping[str, float],
    path: Path,
) -> int:
    """Sample and score completions of these prompts, print a summary, and write them to a table.

    Args:
        module: A module whose engine has the policy's weights and whose rewards are started.
        prompts: The prompts to sample from.
        num_rows_per_step: Completions per rollout step, for the projection.
        shares: Source of a mixture -> its share of these.
        path: Path of the table, with a row for each completion; numbered if it exists already.

    Returns:
        The exit code: 0, or 1 if a reward failed on every completion, or if a run would not train
        on a step with so many missing scores.

    Raises:
        RewardFailed: a reward with ``on_error: raise`` gave no value.
    """
    trial = run_trial(module, prompts, shares)
    console = open_console()
    console.print(summary_table(trial, module.rewards.rewards, num_rows_per_step))
    for line in _notes(trial, module, num_rows_per_step):
        console.print(line, soft_wrap=True)
    path = free_path(path)
    write_table(completions_table(0, trial.rollouts), path)
    console.print(f"Completions: {path}", soft_wrap=True)
    exit_code = report_failures([trial.rollouts])
    if exit_code == ExitCode.DONE and (why := why_not_trained(trial, module)):
        return print_error(why, REWARD_FAILED)
    return exit_code


def run_trial(module: GRPOModule, prompts: Sequence[Prompt], shares: Mapping[str, float]) -> Trial:
    """Sample completions as the first rollout step would, and score them."""
    suite, group_size = module.rewards, module.group_size
    suite.observe()  # drop the measurements of starting the rewards
    scoring = suite.open(prompts, group_size)
    seed = module.seeds.derive(SeedPurpose.ROLLOUT, 0)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        start = time.perf_counter()
        completions = generate(module.engine, prompts, group_size, module.sampling, seed=seed)
        num_rows = len(prompts) * group_size
        scoring.add_all(progress.track(completions, total=num_rows, description="generating"))
        seconds = time.perf_counter() - start
        progress.add_task("scoring", total=None)
        rollouts = scoring.result()
    measurements = dict(zip(suite.weights, suite.observe(), strict=True))
    return Trial(
        rollouts=rollouts,
        generation_seconds=seconds,
        measurements=measurements,
        shares=shares,
    )


def projected_seconds(
    reward: Reward, scores: Sequence[Score], measurements: Measurements, num_rows: float
) -> float:
    """Return the projected seconds of scoring ``num_rows`` completions, from a few scores or none.

    Example: a judge that took 8 calls of 2 s for 8 completions, with a concurrency of 4 and 30
    requests per minute, takes max(64 * 2 / 4, 64 / 30 * 60) = 128 s for 64.
    """
    if not scores:
        return 0.0
    factor = num_rows / len(scores)
    seconds = [score.seconds for score in scores]
    if isinstance(reward, JudgedReward):
        return _judging_seconds(reward, measurements, factor)
    return factor * (float(np.percentile(seconds, 95)) if reward.is_async else sum(seconds))


def _judging_seconds(reward: JudgedReward, measurements: Measurements, factor: float) -> float:
    """Return the seconds that ``factor`` times these calls take within the judge's limits."""
    latencies = measurements.samples.get(LATENCY, [])
    if not latencies:
        return 0.0
    totals = measurements.totals
    tokens = sum(totals[name] for name in TOKENS if name in totals)
    num_calls, mean = factor * len(latencies), sum(latencies) / len(latencies)
    seconds = seconds_of_calls(reward.judge.limits, num_calls, factor * tokens, mean)
    return max(seconds, *latencies)


def in_group_deviation(values: Tensor) -> float | None:
    """Return the mean sample deviation of the groups of [B, G] with two values or more, or None."""
    valid = ~values.isnan()
    deviations = group_deviation(values.nan_to_num(), valid)[valid.sum(1) > 1]
    return deviations.mean().item() if deviations.numel() else None


def summary_table(trial: Trial, rewards: Sequence[Reward], num_rows_per_step: int) -> Table:
    """Return a table with a row for each reward and one for their weighted sum."""
    table = make_table("reward")
    add_numbers(table, "mean", "group std")
    table.add_column("outcomes", justify="right")
    add_numbers(table, "p50", "p95", "per step", "$/step")
    rollouts = trial.rollouts
    for reward in rewards:
        if not (asked := trial.scores_of(reward)):
            table.add_row(reward.name, "–", "–", "not tried", *["–"] * 4)
            continue
        p50, p95 = np.percentile([score.seconds for score in asked], [50, 95])
        measurements = trial.measurements[reward.name]
        num_scored = trial.num_scored(reward, num_rows_per_step)
        cost = sum(score.cost for score in asked) * num_scored / len(asked)
        table.add_row(
            reward.name,
            *_mean_and_deviation(rollouts.parts[reward.name]),
            _outcomes(asked),
            _clock(p50),
            _clock(p95),
            _clock(projected_seconds(reward, asked, measurements, num_scored)),
            f"{cost:.3g}" if cost else "–",
        )
    valid = f"valid {rollouts.valid.double().mean():.0%}"
    table.add_row("weighted sum", *_mean_and_deviation(rollouts.rewards), valid, *[""] * 4)
    return table


def _mean_and_deviation(values: Tensor) -> tuple[str, str]:
    deviation = in_group_deviation(values)
    mean = values.nanmean().item()
    return (
        "–" if np.isnan(mean) else f"{mean:.3f}",
        "–" if deviation is None else f"{deviation:.3f}",
    )


def _clock(seconds: float) -> str:
    if seconds < 1e-4:
        return "< 0.1 ms"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _outcomes(scores: Sequence[Score]) -> str:
    """Return ``ok 75%, timeout 25%``, the most common first."""
    outcomes = [str(score.outcome) for score in scores]
    shares = {outcome: outcomes.count(outcome) / len(outcomes) for outcome in outcomes}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{outcome} {share:.0%}" for outcome, share in ordered)


def _notes(trial: Trial, module: GRPOModule, num_rows_per_step: int) -> list[str]:
    rollouts = trial.rollouts
    lengths = [len(completion.token_ids) for completion in rollouts.completions]
    scaled = trial.generation_seconds * num_rows_per_step / trial.num_rows
    return [
        f"{trial.num_rows} completions of {len(rollouts.groups)} prompts, "
        f"{truncated_fraction(rollouts):.0%} cut off at model.sampling.max_tokens "
        f"{module.sampling.max_tokens}; length {np.mean(lengths):.1f}, at most {max(lengths)}. "
        f"Generation took {_clock(trial.generation_seconds)}; for {num_rows_per_step} completions "
        f"it would take about {_clock(scaled)} at most.",
        *_untried(trial, module.rewards.rewards),
        ASSUMPTIONS.format(num_rows=num_rows_per_step),
        *_judge_notes(trial, module.rewards.rewards),
        *never_scored(rollouts).values(),
        *([] if failed_everywhere(rollouts) else _why_no_signal(rollouts, module)),
    ]


def _why_no_signal(rollouts: RolloutBatch, module: GRPOModule) -> list[str]:
    return no_signal(rollouts, can_end=module.can_end) or _failures(rollouts)


def _untried(trial: Trial, rewards: Sequence[Reward]) -> list[str]:
    """Return which sources of a mixture, and so which rewards, had no prompt."""
    tried = {group.prompt.source for group in trial.rollouts.groups}
    left_out = [source for source in trial.shares if source not in tried]
    if not left_out:
        return []
    names = ", ".join(left_out)
    return [
        f"No prompt of {names} was tried: --n is less than the number of sources. Set "
        f"--n={len(trial.shares)} or more.",
        *(
            f"{one.name} was not tried: it scores {', '.join(one.only_sources or ())} only."
            for one in rewards
            if not trial.scores_of(one)
        ),
    ]


def why_not_trained(trial: Trial, module: GRPOModule) -> str:
    """Return what a run does with such a step if it is not trained on; empty if it is."""
    rollouts = trial.rollouts
    names = weighted_names(module.rewards.rewards)
    status = score_status(rollouts, names)
    why = status.why_not_trained(module.outage.max_absent_fraction)
    failure = find_failure(rollouts, names, attrgetter("is_failure"))
    return f"{why} {failure}{_unlike_a_step(trial.shares)}" if why else ""


def _unlike_a_step(shares: Mapping[str, float]) -> str:
    """Return a note if the trial draws sources in other proportions than a rollout step."""
    if len(set(shares.values())) <= 1:
        return ""
    parts = ", ".join(f"{share:.0%} of {source}" for source, share in shares.items())
    return (
        " But the trial has the sources in equal parts, and a step of the run has "
        f"{parts}: there the share of such rows may be on the other side of the limit."
    )


def _failures(rollouts: RolloutBatch) -> list[str]:
    failure = find_unreported(rollouts)
    return [] if failure is None else [f"Some rows could not be scored: {failure}"]


def _judge_notes(trial: Trial, rewards: Sequence[Reward]) -> list[str]:
    """Return notes on what makes a projection too low."""
    notes = []
    for reward in rewards:
        if not isinstance(reward, JudgedReward):
            continue
        if hits := trial.measurements[reward.name].totals.get("judge/cache_hits"):
            notes.append(
                f"{hits:.0f} verdicts of {reward.name!r} came from the judge's cache: new "
                "completions take longer and cost more than projected."
            )
        if reward.judge.price is None:
            notes.append(f"The cost of {reward.name!r} is unknown: its judge has no price.")
    return notes
