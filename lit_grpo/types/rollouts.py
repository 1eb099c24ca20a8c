"""Prompts, completions, groups and the batch that they make, in the order of the pipeline."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from lit_grpo.types.scores import Score
from lit_grpo.types.text import encodable

Message = Mapping[str, str]
"""One chat message, ``{"role": ..., "content": ...}``."""


def own_copy(value: Any) -> Any:
    """Return a copy of a list, dict, set, tuple or array, and any other value as it is."""
    if not isinstance(value, list | dict | set | tuple | np.ndarray):
        return value
    try:
        return deepcopy(value)
    except Exception:  # of an object within it, which a program has put there
        return value


class Columns(dict[str, Any]):
    """Columns of a row, or a message: cannot be changed, and gives copies of lists and dicts."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "columns and messages of a prompt cannot be changed (other rewards and later steps "
            "read them, too). Change a copy: dict(prompt.columns), or dict(prompt.messages[0])."
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    pop = popitem = clear = update = setdefault = _refuse

    def __getitem__(self, name: str) -> Any:
        return own_copy(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - which calls this

    def __iter__(self) -> Iterator[str]:  # or dict(self) would copy the values as they are
        return super().__iter__()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return ValuesView(self)

    def shared(self) -> dict[str, Any]:
        """Return the columns without copies, for a reader that changes nothing."""
        return dict(super().items())

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __reduce__(self) -> tuple[type[Columns], tuple[dict[str, Any]]]:
        return Columns, (self.shared(),)


def _read_only(columns: Mapping[str, Any]) -> Columns:
    return columns if isinstance(columns, Columns) else Columns(columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data as the policy reads it."""

    id: str
    text: str
    """The prompt after the template or the chat template."""
    token_ids: tuple[int, ...]
    """[P]"""
    messages: tuple[Message, ...] | None = None
    """The conversation; None for a prompt that is plain text."""
    answer: str | None = None
    """The gold answer."""
    given_answer: Any = None
    """The gold answer as the row has it, if that is no text: a number, or a list of equal ones."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every column of the row under its own name, for the rewards, which cannot change them: a list
    or dict is a copy each time it is read."""
    source: str = ""
    """The source of the mixture that the row comes from; empty without a mixture."""
    row: int = -1
    """Its row in that source, from 0; -1 without a mixture."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", _read_only(self.columns))
        object.__setattr__(self, "given_answer", own_copy(self.given_answer))
        if self.messages is not None:
            object.__setattr__(self, "messages", tuple(map(_read_only, self.messages)))


FinishReason = Literal["stop", "length", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation of a prompt.

    ``token_ids`` include a sampled end-of-sequence token and the tokens of a stop string; ``text``
    has neither. The row of a completion that the engine could not sample (`failed`) is logged but
    neither scored nor trained on.
    """

    token_ids: tuple[int, ...]
    """[C]"""
    sampler_logprobs: tuple[float, ...]
    """[C] natural logarithms under the sampling temperature, before top-p and top-k."""
    text: str
    finish_reason: FinishReason
    policy_versions: tuple[int, ...] = ()
    """[C] the version of the weights that sampled each token: the number of optimizer steps and
    rollbacks before. Empty if unknown."""
    failure: str = ""
    """Why the engine could not sample it."""

    def __post_init__(self) -> None:
        for name in ("text", "failure"):
            object.__setattr__(self, name, encodable(getattr(self, name)))

    @classmethod
    def failed(cls, why: str) -> Completion:
        """Return the placeholder of a completion that could not be sampled."""
        return cls(token_ids=(), sampler_logprobs=(), text="", finish_reason="failed", failure=why)

    @property
    def is_failed(self) -> bool:
        return self.finish_reason == "failed"

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCompletion:
    """A completion and the scores that it has so far, by the name of the reward."""

    completion: Completion
    scores: Mapping[str, Score]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt, its G completions and their G scores by the name of the reward."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: Mapping[str, tuple[Score, ...]]


def counted_rows(valid: Tensor) -> Tensor:
    """Return [B, G] True on the counted rows: the valid rows of groups with at least two.

    A row that is the only valid one of its group has no baseline to be compared with.
    """
    return valid & (valid.sum(1, keepdim=True) >= 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The rewards of one prompt's completions."""

    source: str
    """The source of the mixture that the prompt comes from."""
    row: int
    """Its row in that source."""
    rewards: tuple[float, ...]
    """Weighted sums of the valid rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTable:
    """The input of the advantages; with several ranks, the rows of all ranks, in their order."""

    rewards: Tensor
    """[B, G] float64 weighted sum of the parts; NaN where not valid."""
    parts: Mapping[str, Tensor]
    """Reward name to [B, G] float64 unweighted values; NaN where the reward gave none."""
    weights: Mapping[str, float]
    """Reward name to its weight."""
    valid: Tensor
    """[B, G] True on the rows with a reward, except those of excluded groups."""
    lengths: Tensor
    """[B, G] float64 number of tokens of each completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The scored groups of one rollout step: ragged, on the CPU, one object per completion."""

    groups: tuple[Group, ...]
    rewards: Tensor
    """[B, G] float64 weighted sum of the parts; NaN where not valid."""
    parts: Mapping[str, Tensor]
    """Reward name to [B, G] float64 unweighted values; NaN where the reward gave none."""
    valid: Tensor
    """[B, G] True on the rows with a reward, except those of excluded groups."""
    replaced: tuple[GroupResult, ...] = ()
    """The groups without an advantage that dynamic sampling has replaced."""
    stale: frozenset[int] = frozenset()
    """Indices of the groups that are excluded since their weights were too old."""

    @property
    def results(self) -> tuple[GroupResult, ...]:
        """The results of all groups that were sampled, including replaced ones."""
        return (*self.replaced, *map(self._result, range(len(self.groups))))

    def _result(self, index: int) -> GroupResult:
        prompt = self.groups[index].prompt
        rewards = self.rewards[index][self.valid[index]].tolist()
        return GroupResult(source=prompt.source, row=prompt.row, rewards=tuple(rewards))

    @property
    def group_size(self) -> int:
        return self.rewards.shape[1]

    @property
    def counted(self) -> Tensor:
        """[B, G] True on the rows that are compared with others and may be trained on."""
        return counted_rows(self.valid)

    @property
    def completions(self) -> list[Completion]:
        """The N completions in row order."""
        return [completion for group in self.groups for completion in group.completions]

    def reward_table(self, weights: Mapping[str, float]) -> RewardTable:
        """Return the rewards as a table, given the weight of each by name."""
        lengths = [len(completion.token_ids) for completion in self.completions]
        return RewardTable(
            rewards=self.rewards,
            parts=self.parts,
            weights=weights,
            valid=self.valid,
            lengths=torch.tensor(lengths).double().view_as(self.rewards),
        )

    @property
    def sampled(self) -> list[Completion]:
        """The completions that the engine could sample."""
        return [completion for completion in self.completions if not completion.is_failed]

    def without_stale(self, stale: Sequence[bool]) -> RolloutBatch:
        """Return the same batch with every row of the marked groups excluded."""
        rows = torch.tensor(stale)[:, None]
        return replace(
            self,
            stale=self.stale | {index for index, is_stale in enumerate(stale) if is_stale},
            valid=self.valid & ~rows,
            rewards=self.rewards.masked_fill(rows, torch.nan),
        )

    def with_groups(self, indices: Sequence[int], fresh: RolloutBatch) -> RolloutBatch:
        """Return the same batch with the groups of ``fresh`` at the given indices."""
        groups = list(self.groups)
        for index, group in zip(indices, fresh.groups, strict=True):
            groups[index] = group

        def replaced(tensor: Tensor, new: Tensor) -> Tensor:
            return tensor.index_copy(0, torch.tensor(indices), new)

        return RolloutBatch(
            groups=tuple(groups),
            rewards=replaced(self.rewards, fresh.rewards),
            parts={name: replaced(part, fresh.parts[name]) for name, part in self.parts.items()},
            valid=replaced(self.valid, fresh.valid),
            replaced=(*self.replaced, *map(self._result, indices)),
            stale=self.stale - set(indices),
        )
