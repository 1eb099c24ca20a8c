"""Reward functions as TRL and verl have them, and rows for them."""

from __future__ import annotations

from typing import Any

from tiny import completion, prompt

from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Prompt, RolloutBatch

CHAT = Prompt(
    id="chat",
    text="<user>1+1=",
    token_ids=(1,),
    messages=({"role": "user", "content": "1+1="},),
    answer="2",
    columns={"level": 3},
)


def run(reward: Reward, one: Prompt, *texts: str) -> RolloutBatch:
    """Score completions of a prompt."""
    with RewardSuite([reward]) as suite:
        return suite.score([one], [[completion([5, 6], text=text) for text in texts]])


def accuracy(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    if data_source != "openai/gsm8k":
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    return 1.0 if solution_str.strip() == ground_truth else 0.0


def verl_row(**columns: Any) -> Prompt:
    """Return a row as verl's preprocessing of GSM8K writes it."""
    given: dict[str, Any] = {
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0},
    }
    return prompt(answer="gold", **(given | columns))
