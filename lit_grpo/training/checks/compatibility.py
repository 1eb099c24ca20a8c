"""Check the settings of a run against each other, the engine, the model and the data."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import lightning as L
from lightning.pytorch.callbacks import Timer, WeightAveraging
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.data import TrainingLoader
from lit_grpo.objective import AdvantageConfig, Objective
from lit_grpo.policy import Policy
from lit_grpo.policy.teacher import Teacher
from lit_grpo.rollout import RolloutEngine, Sampling
from lit_grpo.stopping import for_this_run, has_step_limit
from lit_grpo.types import Prompt, UserError, check_range, setting_error

log = logging.getLogger(__name__)


def check_sampling(group_size: int, dynamic_sampling_rounds: int, sampling: Sampling) -> None:
    """Check that a group has several completions, which can differ.

    Raises:
        UserError: a number is out of range, or sampling is greedy.
    """
    check_range("model.group_size", group_size, at_least=2, why="a group of one has no baseline")
    check_range(
        "model.dynamic_sampling_rounds",
        dynamic_sampling_rounds,
        at_least=0,
        why="0 turns dynamic sampling off",
    )
    if sampling.is_greedy:
        raise setting_error(
            "model.sampling.temperature",
            "> 0 in training",
            sampling.temperature,
            "identical completions have no advantage over each other",
        )


def check_group_fits(group_size: int, engine: RolloutEngine) -> None:
    """Check that the engine samples as many completions of a prompt.

    Raises:
        UserError: it does not.
    """
    limit = engine.max_group_size
    if limit is not None and group_size > limit:
        raise UserError(
            f"model.group_size must be <= {limit} with the max-num-seqs of the servers, got "
            f"{group_size} (a server refuses a request for more samples than it runs at a time). "
            "Set model.engine.init_args.launch.flags.max-num-seqs to the group size or more, or "
            "lower model.group_size."
        )


def refuse_other_loader(loader: object) -> None:
    """Refuse a loader that cannot say where it is, such as a ``DataLoader`` of torch.

    Raises:
        UserError: it is one.
    """
    if not hasattr(loader, "rewind"):
        raise UserError(
            "the data must come from loaders that keep their position for a resume, got a "
            f"{type(loader).__name__}. Use lit_grpo.PromptData(train=...), which takes files and "
            "lists of rows, or a PromptDataModule of your own, whose rows(split) returns them."
        )


def refuse_adaptive(loader: TrainingLoader, where: str) -> None:
    """Check that no source is adaptive where its results would come too late.

    Raises:
        UserError: one is.
    """
    if loader.is_adaptive:
        raise setting_error("adaptive of a source in data.sources", f"null {where}", "settings")


def check_overlap(
    max_head_offpolicyness: int, optimizer_steps: int, rounds: int, engine: RolloutEngine
) -> None:
    """Check that this engine can sample as far ahead as the setting allows.

    Raises:
        UserError: the engine cannot, or the setting allows less than one rollout step.
    """
    if 0 < max_head_offpolicyness < optimizer_steps or max_head_offpolicyness < 0:
        raise setting_error(
            "model.max_head_offpolicyness",
            f"0 or >= update.epochs * update.minibatches = {optimizer_steps}",
            max_head_offpolicyness,
            "rollouts that are sampled during an update are that many optimizer steps old after it",
        )
    if max_head_offpolicyness and not engine.overlaps_updates:
        raise UserError(
            f"max_head_offpolicyness must be 0 with {type(engine).__name__}, got "
            f"{max_head_offpolicyness} (it samples with the weights that are being updated, or on "
            "their device). Set model.max_head_offpolicyness to 0, or model.engine to an engine "
            "with its own servers."
        )
    if max_head_offpolicyness and rounds:
        raise UserError(
            f"max_head_offpolicyness must be 0 with dynamic_sampling_rounds, got "
            f"{max_head_offpolicyness} and {rounds} (replacing groups would take prompts that are "
            "already being sampled for the next steps). Set one of them to 0."
        )


def refuse_averages(trainer: L.Trainer, engine: RolloutEngine) -> None:
    """Refuse averages of weights with an engine that keeps a copy of the weights.

    A validation swaps in the averages, and the engine would sample the next rollout step with them,
    since the version of the weights is the same.

    Raises:
        UserError: a callback averages weights, and the engine does not sample with the policy.
    """
    kinds = [type(one).__name__ for one in trainer.callbacks if isinstance(one, WeightAveraging)]  # type: ignore[attr-defined]
    if kinds and not engine.samples_with_policy:
        raise UserError(
            f"{kinds[0]} needs an engine that samples with the policy itself, got "
            f"{type(engine).__name__} (validations load the averages into it, and the next step "
            "would be sampled with them). Leave the callback out, set model.engine to HFEngine, or "
            "train without a validation."
        )


def undeclared_passes(engine: RolloutEngine) -> UserError:
    """Return the error of an engine that runs a policy whose weights are divided over ranks."""
    name = type(engine).__name__
    return UserError(
        f"{name}.samples_with_policy must be True, as {name} runs the policy's own model "
        "(the ranks have a part of its weights each, and would wait for each other at every "
        "layer, for ever if one samples fewer tokens). Set samples_with_policy = True in the "
        "class: the model is then whole while it samples."
    )


def refuse_contradictions(policy: Policy, objective: Objective, advantage: AdvantageConfig) -> None:
    """Check that the parts of the config do not contradict each other.

    Raises:
        UserError: two parts contradict each other.
    """
    if policy.lora is not None and objective.kl.refresh_mix < 1:
        raise UserError(
            f"objective.kl.refresh_mix must be 1 with LoRA, got {objective.kl.refresh_mix} (the "
            "average of the factors of two adapters is not the adapter of their average). Set "
            "model.objective.kl.refresh_mix to 1."
        )
    if advantage.discount is not None and objective.surrogate in ("gmpo", "vespo"):
        raise UserError(
            "advantage.discount gives each token its own advantage, but objective.surrogate: "
            f"{objective.surrogate} weights whole sequences by theirs. Set "
            "model.advantage.discount to null."
        )
    is_by_group = advantage.discount is not None and advantage.baseline == "group"
    if objective.kl.place == "reward" and is_by_group:
        raise UserError(
            "objective.kl.place: reward with advantage.discount needs advantage.baseline: batch, "
            "got group (the divergence at each token would be normalised as if it were a step's "
            "reward). Set model.advantage.baseline to batch, or model.objective.kl.place to loss."
        )
    if objective.kl.place == "reward" and advantage.deviation == "mean":
        raise UserError(
            "objective.kl.place: reward subtracts the divergence from the rewards, but "
            "advantage.deviation: mean needs rewards >= 0. Set model.objective.kl.place to loss."
        )
    if objective.kl.place == "reward" and advantage.combine == "normalise_then_sum":
        raise UserError(
            "objective.kl.place: reward subtracts the divergence from the sum of the rewards, but "
            "advantage.combine: normalise_then_sum computes no such sum. Set "
            "model.objective.kl.place to loss, or model.advantage.combine to sum_then_normalise."
        )


def check_teacher(teacher: Teacher | None, objective: Objective) -> None:
    """Check that there is a teacher if the objective has a distillation term, and only then.

    Raises:
        UserError: there is one without the other.
    """
    coef = objective.distillation.coef
    if teacher is None and coef > 0:
        raise UserError(
            f"objective.distillation.coef {coef} needs a teacher, got none (the divergence is that "
            "from its distribution). Set model.teacher.path or model.teacher.urls, or "
            "model.objective.distillation.coef to 0."
        )
    if teacher is not None and coef == 0:
        raise UserError(
            f"a teacher needs objective.distillation.coef above 0, got {coef} (it would be loaded "
            "and never used). Set model.objective.distillation.coef, or leave model.teacher out."
        )


def check_prompts_fit(
    positions: int | None, sampling: Sampling, prompts: Sequence[Prompt], model: str = "model"
) -> None:
    """Check that the model has positions for each prompt and the longest completion.

    Args:
        positions: Most tokens of both together; None for no limit.
        model: What it is called in the error.

    Raises:
        UserError: it has too few.
    """
    lengths = [len(prompt.token_ids) for prompt in prompts]
    longest, num_tokens = max(lengths, default=0), sampling.max_tokens
    if positions is None or longest + num_tokens <= positions:
        return
    remedies = []
    if min(lengths) <= positions - num_tokens:
        limit = positions - num_tokens
        remedies.append(f"set data.max_prompt_tokens to at most {limit} and data.too_long to drop")
    if longest < positions:
        remedies.append(f"lower model.sampling.max_tokens to at most {positions - longest}")
    remedies.append(f"take a {model} with more positions")
    remedy = ", or ".join(remedies)
    raise UserError(
        f"the longest prompt has {longest} tokens and a completion up to {num_tokens}, but the "
        f"{model} has only {positions} positions for both. {remedy[0].upper()}{remedy[1:]}."
    )


def check_completions_fit(positions: int | None, sampling: Sampling) -> None:
    """Check that the model has positions for a token of prompt and the longest completion.

    Args:
        positions: Most tokens of both together; None for no limit.

    Raises:
        UserError: it has too few.
    """
    if positions is not None and sampling.max_tokens >= positions:
        raise setting_error(
            "model.sampling.max_tokens",
            f"below the model's {positions} positions",
            sampling.max_tokens,
            "prompt and completion together must fit",
        )


@rank_zero_only
def log_if_endless(trainer: L.Trainer) -> None:
    """Log how a run ends that has no last step and no time limit."""
    if is_endless(trainer):
        advice = (
            "the run has no last step: Ctrl-C ends it, without final/ (lit-grpo checkpoints RUN "
            "--export DIR writes a model then). For a last step set trainer.max_steps (optimizer "
            "steps) or trainer.max_epochs."
        )
        log.info("%s", for_this_run(trainer, advice))


def is_endless(trainer: L.Trainer) -> bool:
    """Return whether neither a last step nor a time limit ends a run."""
    has_limit = any(isinstance(one, Timer) for one in trainer.callbacks)  # type: ignore[attr-defined]
    return not has_step_limit(trainer) and not has_limit


@rank_zero_only
def log_if_none_held_out(trainer: L.Trainer) -> None:
    """Log that a run without held-out rows does not use the interval that is set."""
    interval = trainer.val_check_interval
    if isinstance(interval, int) and trainer.limit_val_batches:  # Lightning's default is 1.0
        log.info(
            "no row is held out: trainer.val_check_interval (%d) has no effect, and there is no "
            "val/accuracy. Set data.validation to a file or data.validation_size to a number of "
            "rows.",
            interval,
        )


@rank_zero_only
def warn_without_validation(trainer: L.Trainer, num_steps: int) -> None:
    """Warn if a run with validation data ends before its first validation.

    Args:
        num_steps: Rollout steps (for SFT: batches) until ``max_steps`` is reached.
    """
    interval, every_n_epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if interval is None or not sum(trainer.num_val_batches):  # at intervals of time, or off
        return
    per_epoch, first = trainer.num_training_batches, interval
    if every_n_epochs is not None:
        first = (every_n_epochs - 1) * per_epoch + min(interval, per_epoch)
    if num_steps < first:
        counts_steps = (
            "" if every_n_epochs is None else ("trainer.check_val_every_n_epoch to null and ")
        )
        log.warning(
            "no validation will run during training: it ends after step %d (trainer.max_steps: "
            "%d), and the first validation would come after step %.0f "
            "(trainer.check_val_every_n_epoch: %s, trainer.val_check_interval: %s). Set "
            "%strainer.val_check_interval, which then counts steps, to at most %d.",
            *(num_steps, trainer.max_steps, first),
            "null" if every_n_epochs is None else every_n_epochs,
            *(trainer.val_check_interval, counts_steps, num_steps),
        )
