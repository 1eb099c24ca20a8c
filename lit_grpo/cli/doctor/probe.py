"""Try one small rollout with the configured policy, engine and rewards: signal and speed."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

from lit_grpo.cli.built_run import BuiltRun, NotChecked
from lit_grpo.cli.doctor.batch import planned_steps
from lit_grpo.cli.doctor.findings import Finding, failed, ok, refused, remark
from lit_grpo.cli.rewards.commands import load_policy
from lit_grpo.cli.rewards.failures import failed_everywhere
from lit_grpo.cli.rewards.prompts import trial_prompts
from lit_grpo.cli.rewards.trial import Trial, projected_seconds, run_trial, why_not_trained
from lit_grpo.diagnostics.absent_scores import find_failure, never_scored
from lit_grpo.diagnostics.step_findings import (
    LIKELY_FRACTION,
    empty_fraction,
    no_signal,
    sample_completions,
    truncated_fraction,
)
from lit_grpo.objective.advantages import has_signal
from lit_grpo.runs.tables import duration
from lit_grpo.training import GRPOModule
from lit_grpo.types import RolloutBatch

NUM_PROMPTS = 4
NUM_SHOWN = 2


def check_rollout(run: BuiltRun) -> Iterator[Finding]:
    """Sample and score the first prompts of the training data, of each source of a mixture."""
    module = run.grpo
    if module is None:
        yield ok("A warm-up samples nothing: there is nothing to probe.")
        return
    urls = getattr(module.engine, "urls", None)
    if run.is_offline and (urls or run.judged):
        asked = "a judge" if run.judged else "servers"
        raise NotChecked(f"Not tried (--offline): it would ask {asked}.")
    trial = _try(run, module)
    signal = _signal(trial, can_end=module.can_end)
    yield signal
    yield from _failures(trial, signal.text, why_not_trained(trial, module))
    yield ok(_speed(trial, run, module))
    for line in sample_completions(trial.rollouts, NUM_SHOWN):
        yield ok(f"Sampled for {line}")


def _try(run: BuiltRun, module: GRPOModule) -> Trial:
    loader = run.loader.get()
    prompts = trial_prompts(loader, max(NUM_PROMPTS, len(loader.sources)))
    run.outline.get()
    cli = run.cli
    if cli.trainer.world_size > 1:
        cli.trainer = cli.trainer_on_one_device()
        cli.trainer.strategy.connect(module)
    module.engine.precision = cli.trainer.precision
    module.rewards.start(module.reasoning)
    load_policy(cli, module)
    with cli.trainer.precision_plugin.val_step_context():
        return run_trial(module, prompts, loader.shares)


def _signal(trial: Trial, *, can_end: bool) -> Finding:
    """Return a finding on how many groups have rewards that differ, and why if none has.

    Args:
        can_end: Whether anything but the token limit ends a completion.
    """
    rollouts = trial.rollouts
    fraction = has_signal(rollouts.rewards, rollouts.valid).double().mean().item()
    truncated, empty = truncated_fraction(rollouts), empty_fraction(rollouts)
    mean = rollouts.rewards.nanmean().item()
    rewarded = "no completion has a reward" if isnan(mean) else f"mean reward {mean:.3g}"
    text = (
        f"{trial.num_rows} completions of {len(rollouts.groups)} prompts: the rewards differ in "
        f"{fraction:.0%} of the groups, {rewarded}, {truncated:.0%} cut off at "
        f"model.sampling.max_tokens, {empty:.0%} empty."
    )
    is_cut_off, is_empty = can_end and truncated >= LIKELY_FRACTION, empty >= LIKELY_FRACTION
    constant = _constant(rollouts)
    same = f"Reward {constant!r} gives different completions one value." if constant else ""
    if fraction:
        length = "Raise model.sampling.max_tokens, unless that is meant." if is_cut_off else ""
        nothing = "Look at them with lit-grpo rewards." if is_empty else ""
        doubts = [one for one in (length, nothing, same) if one]
        return remark(" ".join([text, *doubts])) if doubts else ok(text)
    causes = " ".join(no_signal(rollouts, can_end=can_end))
    if same:
        return failed(
            f"{text} {causes} {same}",
            "Check that it reads the completion, and that its settings and its model fit.",
        )
    is_broken = is_cut_off or is_empty or bool(failed_everywhere(rollouts))
    return (refused if is_broken else remark)(f"{text} {causes}")


def _constant(rollouts: RolloutBatch) -> str | None:
    """Return a reward that gives different completions of several prompts the same value.

    All 0 or all 1 may be right: a task can be too hard or too easy.
    """
    num_different = len({one.token_ids for one in rollouts.completions})
    for name, part in rollouts.parts.items():
        values = [*{*part[~part.isnan()].tolist()}]
        if len(values) == 1 and values[0] not in (0, 1) and num_different > len(rollouts.groups):
            return name
    return None


def _failures(trial: Trial, said: str, why_not_trained: str) -> Iterator[Finding]:
    """Report failed rewards not reported before."""
    failures = failed_everywhere(trial.rollouts)
    for failure in failures:
        if str(failure) not in said:
            yield refused(f"A reward failed on every completion: {failure}")
    for sentence in never_scored(trial.rollouts).values():
        yield remark(sentence)
    some = find_failure(trial.rollouts)
    if why_not_trained and not failures:
        yield refused(why_not_trained)
    elif some is not None and not failures:
        yield remark(f"Some rows could not be scored: {some}")


def _speed(trial: Trial, run: BuiltRun, module: GRPOModule) -> str:
    """Return tokens per second, and how long steps and the run take from that."""
    num_tokens = sum(len(one.token_ids) for one in trial.rollouts.sampled)
    num_rows = run.cli.datamodule.prompts_per_step * module.group_size
    num_rows //= run.trainer.world_size
    sampling = trial.generation_seconds * num_rows / trial.num_rows
    scoring = max(
        projected_seconds(
            reward,
            trial.scores_of(reward),
            trial.measurements[reward.name],
            trial.num_scored(reward, num_rows),
        )
        for reward in module.rewards.rewards
    )
    step = sampling + scoring
    num_steps = planned_steps(run)
    all_steps = "" if num_steps is None else f", the run about {duration(step * num_steps)}"
    return (
        f"{num_tokens / trial.generation_seconds:,.0f} tokens/s; a rollout step of {num_rows:,} "
        f"completions takes about {duration(step)}{all_steps}: at most "
        f"{duration(sampling)} for sampling and {duration(scoring)} for scoring. Larger batches "
        "are faster per token. The update comes on top."
    )
