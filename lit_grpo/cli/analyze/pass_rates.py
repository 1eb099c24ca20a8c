"""Estimate on each row of prepared data how often a policy is right, and whether it would learn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch
from rich.console import Console

from lit_grpo.cli.analyze.cached_sampling import sampled, samples_of
from lit_grpo.cli.analyze.sample_cache import SampleCache
from lit_grpo.cli.analyze.scored_rows import HAS_GRADIENT, PASS_RATE
from lit_grpo.cli.app import run
from lit_grpo.cli.command_line import CommandLine
from lit_grpo.cli.errors import print_error
from lit_grpo.cli.parsing.invocation import Invocation, read_invocation
from lit_grpo.cli.prepare.write import add_columns
from lit_grpo.cli.rewards.commands import find_prompts, grpo_module, load_policy
from lit_grpo.cli.rewards.failures import report_failures
from lit_grpo.data.rows.prepared import HOLDOUT, PreparedDir, find_prepared
from lit_grpo.objective.advantages import has_signal
from lit_grpo.rewards.scoring.scoring import RewardFailed
from lit_grpo.rewards.scoring.valid_rows import weighted_names
from lit_grpo.stopping import ExitCode
from lit_grpo.training import GRPOModule
from lit_grpo.training.collecting.score_status import (
    ScoreStatus,
    is_absent,
    over_ranks,
    score_status,
)
from lit_grpo.types import (
    Group,
    RolloutBatch,
    UserError,
    check_range,
    setting_error,
)

ROUNDING = 1e-9
"""Tolerance when comparing a sum of rewards with the threshold of a success."""


def write_pass_rates(given: argparse.Namespace, keys: Sequence[str]) -> int:
    """Sample completions of a policy for the rows of a split, and add the pass rates to it.

    The rows are the training prompts of the config, and get its format and its rewards. Without a
    config they are the verifiable rows, whose answers `MathReward` checks.

    Args:
        given: The options of ``analyze``.
        keys: Further keys of a config.

    Returns:
        The exit code; unless it is 0, the data are unchanged.

    Raises:
        UserError: the options or the data are wrong.
    """
    check_range("samples", given.samples, at_least=2)
    prepared = find_prepared(given.run_dir)
    if prepared is None:
        raise UserError(
            f"policy needs prepared data, got {given.run_dir} (the pass rates become a column of "
            "them). Name a directory that prepare has written, or leave --policy out."
        )
    if given.split == HOLDOUT:
        why = "pass rates choose rows to train on, and these are held out"
        raise setting_error("split", "train or validation with --policy", given.split, why)
    named = [word for path in given.config for word in ("--config", path)]
    invocation = read_invocation([*named, *keys])
    path = prepared.split(given.split).path
    settings = [
        f"--model.policy.path={given.policy}",
        f"--model.group_size={given.samples}",
        "--model.outage.max_absent_fraction=0",  # a rate needs all scores
        *_default_rewards(invocation, keys),
        *_default_data(str(path), invocation, keys),
    ]
    work = _Estimate(prepared, given.split, given.policy, given.samples, given.success)
    return run("analyze", [*named, *settings, *keys], work)


def _default_rewards(invocation: Invocation, keys: Sequence[str]) -> list[str]:
    is_given = invocation.has_rewards or any(key.startswith("--model.rewards") for key in keys)
    return [] if is_given else ["--model.rewards=[MathReward]"]


def _default_data(path: str, invocation: Invocation, keys: Sequence[str]) -> list[str]:
    """Return keys that read the rows of a split, unless the config has sources of its own."""
    named = [config["data"] for config in invocation.configs if config.get("data")]
    if any("sources" in (one.get("init_args") or {}) for one in named):
        return []
    if any(key.startswith("--data") for key in keys):
        return []
    if named:
        return [f"--data.train={path}", "--data.validation_size=0", "--data.validation=null"]
    return ["--data=PromptData", f"--data.train={path}", "--data.where={kind: verifiable}"]


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Summary of the scores of one row's completions."""

    source: str
    rate: float
    """The share that is right."""
    has_gradient: bool


@dataclass(slots=True)
class _Estimate:
    """The estimate of the pass rates, with the policy, the rewards and the data of the config."""

    prepared: PreparedDir
    split: str
    policy: str
    samples: int
    success: float | None
    """The sum of rewards from which a completion is right; None means 1; in a
    source with sums other than 0 and 1, no completion is right or wrong then."""
    rows: dict[str, _Sampled] = field(default_factory=dict)
    """Row id -> summary of its scores."""
    graded: set[str] = field(default_factory=set)
    """The sources with other sums than 0 and 1."""

    def __call__(self, cli: CommandLine) -> int:
        try:
            return self._run(cli)
        except RewardFailed as error:
            raise UserError(str(error)) from error

    def _run(self, cli: CommandLine) -> int:
        module = grpo_module(cli)
        ids = self.prepared.split(self.split).ids().to_pylist()
        found = find_prompts(cli, ids)
        prompts = [found[key] for key in ids if key in found]
        if not prompts:
            raise UserError(
                f"the training prompts of the config must be rows of {self.prepared.path}, and "
                "none is. Leave data.sources and data.train out, or name these data there."
            )
        module.rewards.start(module.reasoning)
        module.rewards.check(prompts)
        load_policy(cli, module)
        cache = SampleCache(samples_of(self.prepared), self.policy, module.sampling)
        names = weighted_names(module.rewards.rewards)
        most_absent = module.outage.max_absent_fraction * len(prompts) * module.group_size
        status = ScoreStatus()
        with closing(cache), cli.trainer.precision_plugin.val_step_context():
            for number, rollouts in enumerate(sampled(module, prompts, cache)):
                self._count(rollouts, names)
                if not number and (code := report_failures([rollouts])):
                    return code
                status = over_ranks([status, score_status(rollouts, names)])
                if status.fatal or status.num_absent > most_absent:
                    return self._refuse(status, cache)
        rows = [self.rows.get(key) for key in ids]
        columns = {
            PASS_RATE: pa.array([one and self._rate(one) for one in rows], pa.float64()),
            HAS_GRADIENT: pa.array([one and one.has_gradient for one in rows], pa.bool_()),
        }
        add_columns(self.prepared, self.split, columns, self._about(module))
        self._print_graded()
        self._print_unscored(status)
        return ExitCode.DONE

    def _refuse(self, status: ScoreStatus, cache: SampleCache) -> int:
        """Print that too many scores are missing for reliable pass rates."""
        return print_error(
            f"{status.fatal or status} {self.prepared.path} is unchanged. The completions are kept "
            f"in {cache.directory}: fix the cause, and run the same command again. To go on "
            "without some scores, set --model.outage.max_absent_fraction.",
            ExitCode.SCORES_ABSENT,
        )

    def _count(self, rollouts: RolloutBatch, rewards: Sequence[str]) -> None:
        """Summarise the groups of which no score is missing; an abstention is not missing."""
        differ = has_signal(rollouts.rewards, rollouts.valid)
        least = 1.0 if self.success is None else self.success
        for number, group in enumerate(rollouts.groups):
            scores = rollouts.rewards[number][rollouts.valid[number]]
            if not scores.numel() or _is_incomplete(group, rewards):
                continue
            prompt = group.prompt
            self.rows[prompt.id] = _Sampled(
                source=prompt.source,
                rate=int((scores >= least - ROUNDING).sum()) / scores.numel(),
                has_gradient=bool(differ[number]),
            )
            if (torch.minimum(scores.abs(), (scores - 1).abs()) > ROUNDING).any():
                self.graded.add(prompt.source)

    def _rate(self, one: _Sampled) -> float | None:
        return None if self.success is None and one.source in self.graded else one.rate

    def _print_unscored(self, status: ScoreStatus) -> None:
        if status.num_absent:
            Console(stderr=True).print(
                f"{status} The data rows of these have no {PASS_RATE} and no {HAS_GRADIENT}.",
                soft_wrap=True,
            )

    def _print_graded(self) -> None:
        if self.success is None and self.graded:
            names = ", ".join(sorted(self.graded))
            of = f" of {names}" if names else ""
            Console(stderr=True).print(
                f"no {PASS_RATE} for the rows{of}: their rewards are not only 0 and 1, so that no "
                "completion is right or wrong. Set --success to the sum from which one is right, "
                f"or choose rows by {HAS_GRADIENT}.",
                soft_wrap=True,
            )

    def _about(self, module: GRPOModule) -> dict[str, Any]:
        """Return how the rates were estimated, for the manifest."""
        return {
            "policy": self.policy,
            "samples": self.samples,
            "success": self.success,
            "rewards": list(module.rewards.weights),
        }


def _is_incomplete(group: Group, rewards: Sequence[str]) -> bool:
    """Return whether a failure left a completion of a group without a score."""
    return any(is_absent(score) for name in rewards for score in group.scores[name])
