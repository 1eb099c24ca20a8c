"""From prompts to scored groups, in the order in which they flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Message = Mapping[str, str]
"""One chat message, ``{"role": ..., "content": ...}``."""


class Tokenizer(Protocol):
    """What the rooms need of a ``transformers`` tokenizer."""

    @property
    def eos_token_id(self) -> Any: ...
    @property
    def pad_token_id(self) -> Any: ...
    @property
    def chat_template(self) -> Any: ...
    def __call__(self, text: str, **kwargs: Any) -> Any: ...
    def decode(self, token_ids: list[int], **kwargs: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def save_pretrained(self, save_directory: str) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data, ready to be sampled from.

    ``columns`` holds every column of the row under its own name, so that a reward can read any.
    """

    id: str
    text: str
    """What the policy reads, after the template."""
    token_ids: tuple[int, ...]
    """[P]"""
    messages: tuple[Message, ...] | None = None
    """The conversation, when the prompt is one."""
    answer: str | None = None
    """The gold answer."""
    columns: Mapping[str, Any] = field(default_factory=dict)


FinishReason = Literal["stop", "length", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt.

    ``token_ids`` include the end-of-sequence token when one was sampled and the tokens of a stop
    string; ``text`` has neither. One that an engine could not sample is `failed`: its row is
    absent, which no reward sees and nothing is trained on.
    """

    token_ids: tuple[int, ...]
    """[C]"""
    sampler_logprobs: tuple[float, ...]
    """[C] natural logarithms under the sampling temperature, before top-p and top-k."""
    text: str
    finish_reason: FinishReason
    policy_versions: tuple[int, ...] = ()
    """[C] optimizer steps that the weights had seen when they wrote each token; empty when nobody
    knows."""
    failure: str = ""
    """Why there is no completion."""

    @classmethod
    def failed(cls, why: str) -> Completion:
        return cls(token_ids=(), sampler_logprobs=(), text="", finish_reason="failed", failure=why)

    @property
    def is_failed(self) -> bool:
        return self.finish_reason == "failed"

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


class Outcome(StrEnum):
    """What became of one attempt to score one completion. Only OK carries a value."""

    OK = "ok"
    ABSTAIN = "abstain"
    """The reward does not apply, or has nothing to say."""
    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    """The service could not be reached or failed (5xx)."""
    CONTENT_FILTERED = "content_filtered"
    OUT_OF_TOKENS = "out_of_tokens"
    """The judge's reply was cut off at its token limit."""
    PARSE_ERROR = "parse_error"
    BUDGET_SPENT = "budget_spent"
    ERROR = "error"
    TRUNCATED = "truncated"
    """The completion was cut off and the reward does not score such ones."""
    NOT_SAMPLED = "not_sampled"
    """The engine gave no completion to score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One reward's verdict on one completion: a value, or the reason why there is none.

    Raises:
        ValueError: a value without OK, or OK without a finite value. A failure is never a zero.
    """

    value: float | None
    outcome: Outcome = Outcome.OK
    detail: str = ""
    seconds: float = 0.0
    cost: float = 0.0
    """US dollars."""

    def __post_init__(self) -> None:
        if self.outcome is Outcome.OK:
            if self.value is None or not -float("inf") < self.value < float("inf"):
                raise ValueError(
                    f"a score that is ok needs a finite value, got {self.value} "
                    "(return None for a completion that could not be scored)"
                )
        elif self.value is not None:
            raise ValueError(
                f"a score with outcome {self.outcome} must have no value, got {self.value} "
                "(a failure is never a number)"
            )

    @property
    def is_ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def is_failure(self) -> bool:
        """Neither a value nor the statement that the reward does not apply."""
        return self.outcome not in (Outcome.OK, Outcome.ABSTAIN)

    @property
    def is_outage(self) -> bool:
        """A failure that lies not in the completion, so that asking again may give a value."""
        return self.is_failure and self.outcome not in (Outcome.TRUNCATED, Outcome.NOT_SAMPLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What a reward measured while it scored, apart from the scores; metrics carry the names."""

    totals: Mapping[str, float] = field(default_factory=dict)
    """Summed over the rollout step and all ranks."""
    means: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Their mean over the rollout step and all ranks counts."""
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Their mean and their 95th percentile count; the name of the latter ends with ``_p95``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt, its G completions and, for each reward by name, their G scores."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: Mapping[str, tuple[Score, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The scored groups of one rollout step; ragged, on the CPU, readable.

    ``rewards`` and ``parts`` are NaN where ``valid`` (or the part) has no value.
    """

    groups: tuple[Group, ...]
    rewards: Tensor
    """[B, G] float64 weighted sum of the parts, NaN where not valid."""
    parts: Mapping[str, Tensor]
    """name -> [B, G] float64 unweighted value of one reward, NaN where it gave none."""
    valid: Tensor
    """[B, G] True where a row votes in its group and is trained on."""

    @property
    def group_size(self) -> int:
        return self.rewards.shape[1]

    @property
    def completions(self) -> list[Completion]:
        """The N completions in row order."""
        return [completion for group in self.groups for completion in group.completions]

    @property
    def sampled(self) -> list[Completion]:
        """The completions without those that failed."""
        return [completion for completion in self.completions if not completion.is_failed]

    def with_groups(self, places: Sequence[int], fresh: RolloutBatch) -> RolloutBatch:
        """The same batch with the groups of another one in the given places."""
        groups = list(self.groups)
        for place, group in zip(places, fresh.groups, strict=True):
            groups[place] = group

        def put(tensor: Tensor, new: Tensor) -> Tensor:
            return tensor.index_copy(0, torch.tensor(places), new)

        return RolloutBatch(
            groups=tuple(groups),
            rewards=put(self.rewards, fresh.rewards),
            parts={name: put(part, fresh.parts[name]) for name, part in self.parts.items()},
            valid=put(self.valid, fresh.valid),
        )
