"""The arguments that TRL and verl pass to a reward function, from a row and its completions."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.types import Completion, Prompt
from lit_grpo.types.rollouts import own_copy

TRL_TRAINER_ARGUMENTS = {"trainer_state", "log_extra", "log_metric"}
"""Arguments that TRL's trainer passes in addition to columns, without a counterpart here."""


def _trl_names(prompt: Prompt) -> list[str]:
    """Return the names of all columns except the prompt's, and ``answer`` for the gold answer."""
    gold = [] if prompt.answer is None else ["answer"]
    hidden = {"prompt", "completion", *TRL.reserved}
    return [name for name in dict.fromkeys([*gold, *prompt.columns]) if name not in hidden]


def _trl_value(prompt: Prompt, name: str) -> Any:
    return prompt.columns[name] if name in prompt.columns else _gold(prompt)


def _gold(prompt: Prompt) -> Any:
    """Return the gold answer as the row has it: a text, a number or a list."""
    return prompt.answer if prompt.given_answer is None else own_copy(prompt.given_answer)


def _verl_gold(prompt: Prompt) -> Any:
    reward_model = prompt.columns.get("reward_model")
    gold = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    return _gold(prompt) if gold is None else gold


VERL_ARGUMENTS: Mapping[str, Callable[[Prompt], Any]] = {
    "data_source": lambda prompt: prompt.columns.get("data_source"),
    "ground_truth": _verl_gold,
    "extra_info": lambda prompt: prompt.columns.get("extra_info") or {},
}
"""verl's arguments from a row, which may lack some: None."""


def _verl_names(prompt: Prompt) -> list[str]:
    return [name for name, read in VERL_ARGUMENTS.items() if read(prompt) is not None]


def _verl_value(prompt: Prompt, name: str) -> Any:
    return VERL_ARGUMENTS[name](prompt)


@dataclass(frozen=True, kw_only=True)
class CallConvention:
    """The arguments that one library passes to a reward function."""

    reserved: tuple[str, ...]
    """Names of the arguments that hold prompts and completions."""
    names: Callable[[Prompt], Collection[str]]
    """Return the names of the arguments that come from the row."""
    value: Callable[[Prompt, str], Any]
    """Return the value of one of them, which is the caller's own."""


TRL = CallConvention(
    reserved=("prompts", "completions", "completion_ids"), names=_trl_names, value=_trl_value
)
VERL = CallConvention(reserved=("solution_str",), names=_verl_names, value=_verl_value)


def completion_arguments(prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
    """Return TRL's arguments with the completions: texts, or messages for a conversation."""
    ids = [list(one.token_ids) for one in completions]
    if prompt.messages is None:
        prompts: list[Any] = [prompt.text for _ in completions]
        texts: list[Any] = [one.text for one in completions]
    else:
        prompts = [[dict(message) for message in prompt.messages] for _ in completions]
        texts = [[{"role": "assistant", "content": one.text}] for one in completions]
    return {"prompts": prompts, "completions": texts, "completion_ids": ids}


def about_completions(prompt: Prompt, error: str) -> str:
    """Return a hint on the type of completions, for a function that expected the other type."""
    if prompt.messages is None:
        is_meant = error.startswith("string indices must be integers")
        texts = "Each completion is a text here, as the prompt is. With data.chat: true both are"
        return f"{texts} conversations, as in TRL." if is_meant else ""
    is_meant = bool(re.search(r"'(list|dict)' object has no|(not|got|type:) \W?(list|dict)", error))
    turns = "Each completion is a conversation here, as the prompt is: its text is"
    return f'{turns} completion[0]["content"].' if is_meant else ""
