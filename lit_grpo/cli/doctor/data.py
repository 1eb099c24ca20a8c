"""Check that the data can be read and scored and fits the model, and that no splits overlap."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lit_grpo.cli.built_run import BuiltRun, NotChecked, is_ours, own_reward, suite_of
from lit_grpo.cli.doctor.findings import Finding, ok, remark
from lit_grpo.data import PromptDataModule
from lit_grpo.data.prompts.chat import describe_answered
from lit_grpo.policy.files.vocabulary import check_prompt_tokens
from lit_grpo.rewards import FunctionReward, JudgedReward, Reward
from lit_grpo.training import Evaluation, SFTModule
from lit_grpo.training.checks.compatibility import check_prompts_fit
from lit_grpo.types import Prompt


def check_rows(run: BuiltRun) -> Iterator[Finding]:
    """Read and tokenize all rows; a null or an empty prompt, or a missing gold, is an error."""
    data = run.cli.datamodule
    if run.tokenizer.or_none() is None and isinstance(data, PromptDataModule):
        rows = data.checked_rows("train")  # reports a wrong path
        raise NotChecked(
            f"{len(rows):,} rows can be read. Their prompts and gold answers were not checked, "
            "since the tokenizer could not be read."
        )
    loader, held_out = run.loader.read(), run.val_prompts
    run.module.check_loader(loader)
    yield ok(f"{loader.num_prompts:,} training prompts, {len(held_out):,} held-out prompts.")
    lengths = np.array(run.prompt_lengths)
    limit = getattr(getattr(data, "prompt_format", None), "max_prompt_tokens", None)
    allowed = "" if limit is None else f" (data.max_prompt_tokens: {limit:,})"
    yield ok(
        f"Tokens of a training prompt: median {np.median(lengths):,.0f}, 95% at most "
        f"{np.percentile(lengths, 95):,.0f}, longest {lengths[0]:,}{allowed}."
    )
    if held_out and (leaked := getattr(data, "leaked", "")):
        yield remark(leaked)
    yield from _suspicious(run.prompts, run.grpo.rewards.rewards if run.grpo else ())


def _suspicious(train: Sequence[Prompt], rewards: Sequence[Reward]) -> Iterator[Finding]:
    """Yield what is allowed but rarely meant: prompts that are blank, repeated or (un)answered."""
    if repeated := len(train) - len({prompt.text for prompt in train}):
        yield remark(f"{repeated:,} of {len(train):,} training prompts repeat others.")
    if blank := sum(_is_blank(prompt) for prompt in train):
        yield remark(f"{blank:,} of {len(train):,} training prompts are blank. Remove these rows.")
    if answered := describe_answered(train):
        yield remark(answered)
    for reward in rewards:
        own = reward.applicable_prompts(train)
        unanswered = sum(prompt.answer is None for prompt in own)
        if unanswered and _may_need_gold(reward):
            yield remark(
                f"{unanswered:,} of the {len(own):,} training prompts of {reward.name} have no "
                "gold answer: it cannot score them if it compares with that."
            )


def _may_need_gold(reward: Reward) -> bool:
    """Return whether a reward may compare with gold answers without checking that there are any."""
    return not _has_check(reward) and not is_ours(own_reward(reward))


def _is_blank(prompt: Prompt) -> bool:
    return not (prompt.messages[-1]["content"] if prompt.messages else prompt.text).strip()


def check_lengths(run: BuiltRun) -> Iterator[Finding]:
    """Check that the model and the teacher have positions for prompts and completions."""
    prompts = run.prompts  # if there are none, `check_rows` has said why
    outline: Any = run.outline.get()
    check_prompt_tokens(outline.config, prompts)
    positions, completion_tokens = run.positions, run.completion_tokens
    if isinstance(run.module, SFTModule):
        run.module.check_targets_fit(positions, prompts)
    if not prompts or positions is None or completion_tokens >= positions:
        return
    if run.grpo:
        check_prompts_fit(positions, run.module.sampling, prompts)
    longest = run.prompt_lengths[0] + completion_tokens
    yield ok(f"Prompt and completion together have at most {longest:,} of {positions:,} tokens.")


def check_scoring(run: BuiltRun) -> Iterator[Finding]:
    """Let the rewards check the data as at the start of training."""
    prompts, held_out = run.prompts, run.val_prompts
    if not prompts:
        return
    trained = run.grpo.rewards.rewards if run.grpo else ()
    checked = [one for one in trained if _check_prompts(run, one, prompts)]
    yield from _scored(trained, checked, "training", run.probe_advice)
    if held_out:
        evaluation = run.module.evaluation
        rewards = evaluation.suite.rewards
        checked = [one for one in rewards if _check_prompts(run, one, held_out, evaluation)]
        yield from _scored(rewards, checked, "held-out", run.probe_advice)


def _scored(
    rewards: Sequence[Reward], checked: Sequence[Reward], which: str, advice: str
) -> Iterator[Finding]:
    """Yield which rewards can score prompts, and for which this is not known."""
    functions = [one for one in checked if isinstance(own_reward(one), FunctionReward)]
    if able := [one for one in checked if one not in functions]:
        whose = "its" if len(able) == 1 else "their"
        of = f" of {whose} sources" if any(one.only_sources for one in able) else ""
        yield ok(f"{_names(able)} can score every {which} prompt{of}.")
    for one in functions:
        yield ok(f"{_given_columns(one, which)}{advice}")
    others = [one for one in rewards if one not in checked]
    silent = [one for one in others if not _has_check(one)]
    for unchecked, why in (
        (silent, "no method check(prompts) says so"),
        ([one for one in others if one not in silent], "it was not started, as credentials says"),
    ):
        if unchecked:
            yield remark(
                f"Whether {_names(unchecked)} can score the {which} prompts is not known: {why}."
                f"{advice}"
            )


def _given_columns(reward: Reward, which: str) -> str:
    """Return a note on the columns that a function gets; nothing else of it is checked."""
    function = own_reward(reward)
    assert isinstance(function, FunctionReward)
    whose = " of its sources" if reward.only_sources else ""
    columns = ", ".join(function.columns)
    if not columns:
        return f"{reward.name} requires no columns."
    return f"The columns that {reward.name} requires are in every {which} prompt{whose}: {columns}."


def _has_check(reward: Reward) -> bool:
    return type(own_reward(reward)).check is not Reward.check


def _check_prompts(
    run: BuiltRun,
    reward: Reward,
    prompts: Sequence[Prompt],
    evaluation: Evaluation | None = None,
) -> bool:
    """Let a reward check the prompts; return False if it does not check, or does not start.

    A built-in reward that does not check them can score any.

    Args:
        evaluation: The evaluation that uses the reward as held-out accuracy, if one does.

    Raises:
        UserError: it can never score some of them.
    """
    if not _has_check(reward):
        return is_ours(own_reward(reward))
    if isinstance(reward, JudgedReward):  # its start asks the judge
        checked = reward.check(reward.applicable_prompts(prompts))
        if inspect.isawaitable(checked):
            asyncio.run(_wait(checked))
        return True
    if not run.may_start(reward):
        return False
    if reward in run.started and not run.start_of(reward).or_none():
        return False  # `check_credentials` says why
    suite = evaluation.suite if evaluation else suite_of(reward)
    with run.running(suite):
        (evaluation or suite).check(prompts)
    return True


async def _wait(awaitable: object) -> None:
    await awaitable  # type: ignore[misc]


def _names(rewards: Sequence[Reward]) -> str:
    return ", ".join(reward.name for reward in rewards)
