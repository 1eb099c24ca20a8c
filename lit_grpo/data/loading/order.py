"""The order in which the rows of one source are trained on, independent of other sources."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lit_grpo.data.loading.contents import describe_rows
from lit_grpo.data.prompts.lazy_prompts import LazyPrompts
from lit_grpo.types import Prompt, UserError
from lit_grpo.types.rollouts import GroupResult

MAX_BUILT_AT_START = 1_000
"""Prompts that are built only to check a run at its start."""


class Permutations:
    """The order of rows in each epoch, which a seed determines; that of the last call is kept."""

    def __init__(self, num_rows: int, seed: Sequence[int]) -> None:
        self._num_rows = num_rows
        self._seed = seed
        self._kept: tuple[int, NDArray[np.int64]] | None = None

    def __call__(self, epoch: int) -> NDArray[np.int64]:
        if self._kept is None or self._kept[0] != epoch:
            generator = np.random.default_rng((*self._seed, epoch))
            self._kept = epoch, generator.permutation(self._num_rows)
        return self._kept[1]


class RowOrder(Protocol):
    """The prompts of one source, without end, in an order that its seed and position determine.

    Every rank has one with the same state, and takes the same numbers.
    """

    name: str
    """The name of the source, which its prompts carry."""
    num_rows: int | None
    """None for a stream, whose number of rows is unknown."""
    epoch_size: int
    """The number of rows in an epoch; of a stream, what is taken for one."""
    fingerprint: str
    """Differs between sources with different rows, so a run is not resumed on other rows."""

    def take(self, number: int) -> list[Prompt]:
        """Return the next prompts; skip rows whose prompts are too long."""

    def prepare_ahead(self, number: int) -> None:
        """Begin to build that many prompts after those taken; never changes what `take` returns."""

    def position(self) -> Any:
        """Return where the order stands, for `move_to`; cheap enough to be asked at each step."""

    def move_to(self, position: Any) -> None:
        """Go back to a position that was returned since the last load."""

    def some_prompts(self, limit: int) -> Sequence[Prompt]:
        """Return all prompts, or as many that are spread over the rows."""

    def find(self, ids: Collection[str]) -> Mapping[str, Prompt]:
        """Return the prompts with these ids; skip unknown ids."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: numbers, texts, lists and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def describe_rows(self) -> str:
        """Return what differs between rows with other contents, and between other orders."""

    def record(self, results: Sequence[GroupResult]) -> None:
        """Record the results of prompts that were taken; the same on every rank."""
        return

    def metrics(self) -> dict[str, float]:
        """Return metrics of the rows, to log with a step's metrics."""
        return {}


def of_seeds(seeds: Sequence[int]) -> str:
    """Name the seeds of an order, except the last one, which comes from the source's name."""
    return f" in the order of seed {', '.join(map(str, seeds[:-1]))}"


class TableOrder(RowOrder):
    """The prompts of a table: a permutation of its rows in every epoch.

    When an epoch ends within a step, the step continues with the next one.

    Args:
        name: As in `RowOrder`.
        prompts: The same prompts in the same order on every rank.
        seed: With the name, the seed of the permutation of each epoch.
    """

    def __init__(
        self, name: str, prompts: Sequence[Prompt] | LazyPrompts, seed: Sequence[int]
    ) -> None:
        self.name = name
        self.num_rows = self.epoch_size = len(prompts)
        self._prompts = prompts
        self._seed = (*seed, crc32(name.encode()))
        self._epoch = 0
        self._position = 0
        self.permutation = Permutations(len(prompts), self._seed)

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        found = hashlib.sha256()
        for number, one in enumerate(self._ids()):
            found.update(f"\n{one}".encode() if number else one.encode())
        return found.hexdigest()[:16]

    def describe_rows(self) -> str:
        return describe_rows(self._prompts) + of_seeds(self._seed)

    def _ids(self) -> Iterable[str]:
        if isinstance(self._prompts, LazyPrompts):
            return self._prompts.ids()
        return (prompt.id for prompt in self._prompts)

    def take(self, number: int) -> list[Prompt]:
        taken: list[Prompt] = []
        num_too_long = 0
        while len(taken) < number:
            prompt = self._prompts[self._next_row()]
            if prompt is not None:
                taken.append(prompt)
                num_too_long = 0
            elif (num_too_long := num_too_long + 1) == self.num_rows:
                raise none_short_enough(self.num_rows)
        return taken

    def _next_row(self) -> int:
        row = int(self.permutation(self._epoch)[self._position])
        self._position += 1
        if self._position == self.num_rows:
            self._epoch, self._position = self._epoch + 1, 0
        return row

    def prepare_ahead(self, number: int) -> None:
        if isinstance(self._prompts, LazyPrompts):
            rows = self.permutation(self._epoch)[self._position : self._position + number]
            self._prompts.prepare(rows.tolist())

    def position(self) -> tuple[int, int]:
        return self._epoch, self._position

    def move_to(self, position: tuple[int, int]) -> None:
        self._epoch, self._position = position

    def some_prompts(self, limit: int) -> Sequence[Prompt]:
        if isinstance(self._prompts, LazyPrompts):
            limit = min(limit, MAX_BUILT_AT_START)
        step = max(1, -(-len(self._prompts) // limit))
        return [prompt for prompt in self._prompts[::step] if prompt is not None]

    def find(self, ids: Collection[str]) -> Mapping[str, Prompt]:
        if isinstance(self._prompts, LazyPrompts):
            found = [self._prompts[row] for row in self._prompts.rows.find(ids)]
            return {prompt.id: prompt for prompt in found if prompt is not None}
        wanted = set(ids)
        return {prompt.id: prompt for prompt in self._prompts if prompt.id in wanted}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.move_to((state["epoch"], state["position"]))


def none_short_enough(number: int) -> UserError:
    return UserError(
        f"none of the {number:,} prompts is within max_prompt_tokens. Raise data.max_prompt_tokens."
    )
