"""Order the rows of a source by how often the policy succeeds on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lit_grpo.data.loading.order import TableOrder, none_short_enough
from lit_grpo.data.prompts.lazy_prompts import LazyPrompts
from lit_grpo.types import Prompt, check_range, setting_error
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.rollouts import GroupResult

Level = Literal["easy", "normal", "hard"]

LEVELS: tuple[Level, ...] = ("easy", "normal", "hard")
RESTING = len(LEVELS)
FALLBACKS = (LEVELS.index("normal"), LEVELS.index("hard"), LEVELS.index("easy"), RESTING)
"""Levels to take a row from if its own has none left, in this order."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, modulo 1, are spread evenly however many they are."""
_KEY = "data.sources: adaptive"


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Sample rows by how often the policy has lately succeeded on them.

    Args:
        success: A completion with at least this reward is a success.
        shares: The shares of easy, normal and hard rows, relative to their sum. A row is normal
            until it was sampled, and rows of another level are sampled where one has none.
        easy_above: A row is easy above this share of successes.
        hard_below: A row is hard below this share of successes.
        momentum: Weight of the share so far, against the share in the last group.
        solved_at: A row rests when its last group has at least this share of successes.
        rest_epochs: For how long it rests: until so many times the rows of the source were sampled.

    Raises:
        UserError: a setting is out of range.
    """

    success: float = 1.0
    shares: dict[str, float] = field(
        default_factory=lambda: {"easy": 0.2, "normal": 0.5, "hard": 0.3}
    )
    easy_above: float = 0.8
    hard_below: float = 0.2
    momentum: float = 0.5
    solved_at: float = 1.0
    rest_epochs: float = 2.0

    def __post_init__(self) -> None:
        check_fields(_KEY, self)
        for name, share in self.shares.items():
            if name not in LEVELS:
                raise setting_error(f"{_KEY}.shares", f"shares of {', '.join(LEVELS)}", repr(name))
            check_range(f"{_KEY}.shares.{name}", share, at_least=0)
        if missing := [level for level in LEVELS if level not in self.shares]:
            raise setting_error(
                f"{_KEY}.shares",
                f"shares of {', '.join(LEVELS)}",
                f"none of {', '.join(missing)}",
                "a level may have the share 0",
            )
        if not sum(self.shares.values()):
            raise setting_error(f"{_KEY}.shares", "a share above 0", self.shares)
        check_range(f"{_KEY}.easy_above", self.easy_above, at_least=0, at_most=1)
        check_range(f"{_KEY}.hard_below", self.hard_below, at_least=0, at_most=self.easy_above)
        check_range(f"{_KEY}.momentum", self.momentum, at_least=0, at_most=1)
        check_range(f"{_KEY}.solved_at", self.solved_at, above=0)
        check_range(f"{_KEY}.rest_epochs", self.rest_epochs, at_least=0)


class AdaptiveOrder(TableOrder):
    """The prompts of a table, by the levels of `Adaptive`.

    Of each level, the row sampled longest ago comes next; rows never sampled come in the order of a
    permutation.

    Args:
        name: As in `TableOrder`.
        prompts: As in `TableOrder`.
        seed: As in `TableOrder`.
        adaptive: The settings.
    """

    def __init__(
        self,
        name: str,
        prompts: Sequence[Prompt] | LazyPrompts,
        seed: Sequence[int],
        adaptive: Adaptive,
    ) -> None:
        super().__init__(name, prompts, seed)
        self._settings = adaptive
        weights = [adaptive.shares[level] for level in LEVELS]
        self._bounds = np.array([*accumulate(weights)]) / sum(weights)
        self._num_taken = 0
        self._sampled_at: NDArray[np.float64] = np.empty(self.num_rows)
        """When each row was sampled last, in rows; negative before, infinite if it is too long."""
        self._sampled_at[self.permutation(0)] = np.arange(self.num_rows) - self.num_rows
        self._share: NDArray[np.float64] = np.full(self.num_rows, np.nan)
        """The share of successes of each row."""
        self._rests_until: NDArray[np.float64] = np.zeros(self.num_rows)

    def take(self, number: int) -> list[Prompt]:
        taken: list[Prompt] = []
        while len(taken) < number:
            for row in self._next_rows(min(number - len(taken), self.num_rows)):
                prompt = self._prompts[row]
                if prompt is None:
                    self._sampled_at[row] = np.inf
                else:
                    taken.append(prompt)
                    self._sampled_at[row] = self._num_taken
                    self._num_taken += 1
        return taken

    def prepare_ahead(self, number: int) -> None:
        if isinstance(self._prompts, LazyPrompts):
            self._prompts.prepare(self._next_rows(min(number, self.num_rows)))

    def record(self, results: Sequence[GroupResult]) -> None:
        """Record the results of rows, in the order of the ranks."""
        settings = self._settings
        for one in results:
            if not one.rewards:
                continue
            successes = [reward >= settings.success for reward in one.rewards]
            share, before = sum(successes) / len(successes), self._share[one.row]
            if np.isnan(before):
                self._share[one.row] = share
            else:
                self._share[one.row] += (1 - settings.momentum) * (share - before)
            if share >= settings.solved_at:
                rest = settings.rest_epochs * self.num_rows
                self._rests_until[one.row] = self._num_taken + rest

    def metrics(self) -> dict[str, float]:
        """Return the shares of the rows of each level, and of those that rest."""
        counts = np.bincount(self._levels(), minlength=RESTING + 1) / self.num_rows
        names = (*LEVELS, "resting")
        return {
            f"adaptive/{self.name}/{name}": float(n) for name, n in zip(names, counts, strict=True)
        }

    def position(self) -> Any:
        return self._num_taken, self._sampled_at.copy()

    def move_to(self, position: Any) -> None:
        self._num_taken, sampled_at = position
        self._sampled_at = sampled_at.copy()

    def state_dict(self) -> dict[str, Any]:
        rows = np.flatnonzero(self._sampled_at >= 0)
        values = {
            "sampled_at": self._sampled_at,
            "share": self._share,
            "rests_until": self._rests_until,
        }
        of_rows = {name: torch.from_numpy(one[rows]) for name, one in values.items()}
        return {"num_taken": self._num_taken, "rows": torch.from_numpy(rows)} | of_rows

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rows = state["rows"].numpy()
        self._num_taken = state["num_taken"]
        self._sampled_at[rows] = state["sampled_at"].numpy()
        self._share[rows] = state["share"].numpy()
        self._rests_until[rows] = state["rests_until"].numpy()

    def _levels(self) -> NDArray[np.int64]:
        """Return the level of each row, as an index."""
        levels = np.full(self.num_rows, LEVELS.index("normal"))
        levels[self._share > self._settings.easy_above] = LEVELS.index("easy")
        levels[self._share < self._settings.hard_below] = LEVELS.index("hard")
        levels[self._rests_until > self._num_taken] = RESTING
        return levels

    def _next_rows(self, number: int) -> list[int]:
        """Return the rows that come next, at most as many as there are."""
        levels = self._levels()
        queues = [self._longest_ago(levels == one, number) for one in range(RESTING + 1)]
        places = GOLDEN * (self._num_taken + np.arange(number)) % 1
        rows: list[int] = []
        for level in np.searchsorted(self._bounds, places, side="right").tolist():
            queue = next((queues[one] for one in (level, *FALLBACKS) if queues[one]), None)
            if queue is None:
                break
            rows.append(queue.popleft())
        if not rows:
            raise none_short_enough(self.num_rows)
        return rows

    def _longest_ago(self, is_candidate: NDArray[np.bool_], number: int) -> deque[int]:
        """Return the rows sampled longest ago among some rows, in that order."""
        rows = np.flatnonzero(is_candidate & np.isfinite(self._sampled_at))
        if len(rows) > number:
            rows = rows[np.argpartition(self._sampled_at[rows], number)[:number]]
        return deque(rows[np.argsort(self._sampled_at[rows])].tolist())
