"""Batch the prompts of several sources, with exact numbers of each in every step of a phase."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from lit_grpo.data.loading.adaptive import AdaptiveOrder
from lit_grpo.data.loading.curriculum import Curriculum, quotas
from lit_grpo.data.loading.loader import TrainingLoader, check_sizes
from lit_grpo.data.loading.order import RowOrder
from lit_grpo.types import Prompt, UserError
from lit_grpo.types.rollouts import GroupResult

log = logging.getLogger(__name__)

MAX_CHECKED_PROMPTS = 10_000
"""Prompts that a run is checked with at its start."""


class MixtureLoader(TrainingLoader):
    """A loader of prompts from several sources, each with an order and a position of its own.

    Every step has the numbers of `quotas`; they are mixed by the seed and the number of the batch,
    and each rank gets a contiguous part. Every rank takes the whole batch from the orders, so that
    their states are the same everywhere.

    An epoch is nominal: as many batches as all rows fill. The sources continue across epochs.

    Args:
        orders: The orders of the sources, none of them empty. A single one without a name makes a
            loader without sources.
        batch_size: Prompts per batch, over all ranks.
        curriculum: The weights of the sources by phase.
        clock: Returns the number of optimizer steps before a batch, given how many batches it lies
            after the one that is being trained on.
        seed: Seed of the mixing.
        rank: Rank of this process.
        world_size: Number of processes.
        epoch_limit: Length of an epoch as for ``Trainer.limit_train_batches``.

    Raises:
        UserError: the ranks cannot share a batch, or a step has more prompts of a source than it
            has rows.
    """

    def __init__(
        self,
        orders: Sequence[RowOrder],
        batch_size: int,
        curriculum: Curriculum,
        clock: Callable[[int], int],
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epoch_limit: int | float = 1.0,
    ) -> None:
        self.batch_size = batch_size
        self.sources = tuple(order.name for order in orders if order.name)
        self.curriculum = curriculum
        self._orders = {order.name: order for order in orders}
        self._clock = clock
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._quotas = [quotas(phase.weights, batch_size) for phase in curriculum.phases]
        self._check_sizes()
        self._batch = 0
        self._earlier_boundaries: list[int] | None = None
        self._phase = 0
        self._before_batch = self._position()
        limit = epoch_limit if isinstance(epoch_limit, int) else int(len(self) * epoch_limit)
        self._epoch_size = limit if 0 < limit < len(self) else len(self)

    def __len__(self) -> int:
        return max(1, self.num_prompts // self.batch_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        epoch = self._batch // self._epoch_size
        while self._batch // self._epoch_size == epoch:
            self._before_batch = self._position()
            yield self._next(self._clock(0))

    def take(self, needed: Mapping[str, int]) -> dict[str, list[Prompt]]:
        return {
            source: self._share(self._orders[source].take(number * self._world_size))
            for source, number in needed.items()
        }

    def peek(self, number: int) -> list[Prompt]:
        here = self._position()
        for ahead in range(1, number + 1):
            prompts = self._next(self._clock(ahead))
        self._move_to(here)
        return prompts

    def rewind(self) -> None:
        self._move_to(self._before_batch)

    @property
    def num_prompts(self) -> int:
        return sum(order.epoch_size for order in self._orders.values())

    def some_prompts(self) -> Sequence[Prompt]:
        return self._some_prompts

    @cached_property
    def _some_prompts(self) -> Sequence[Prompt]:
        limit = MAX_CHECKED_PROMPTS // len(self._orders)
        return [*chain.from_iterable(one.some_prompts(limit) for one in self._orders.values())]

    def find(self, ids: Collection[str]) -> dict[str, Prompt]:
        found: dict[str, Prompt] = {}
        for order in self._orders.values():
            found |= order.find(ids)
        return found

    @property
    def shares(self) -> dict[str, float]:
        numbers = self._quotas[self._phase]
        return {name: numbers.get(name, 0) / self.batch_size for name in self.sources}

    @property
    def is_adaptive(self) -> bool:
        return any(isinstance(order, AdaptiveOrder) for order in self._orders.values())

    def record(self, results: Sequence[GroupResult]) -> None:
        for name, order in self._orders.items():
            order.record([one for one in results if one.source == name])

    def metrics(self) -> dict[str, float]:
        shares = {f"data/{name}/share": share for name, share in self.shares.items()}
        for order in self._orders.values():
            shares |= order.metrics()
        if len(self.curriculum.phases) == 1:
            return shares
        scale = self.curriculum.phases[self._phase].lr_scale
        return shares | {"curriculum/phase": self._phase + 1, "curriculum/lr_scale": scale}

    def settings(self) -> dict[str, Any]:
        orders = self._orders.items()
        rows = {f"sources.{name}.rows": order.describe_rows() for name, order in orders}
        return super().settings() | rows

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch": self._batch,
            "boundaries": list(self.curriculum.boundaries),
            "fingerprints": {name: one.fingerprint for name, one in self._orders.items()},
            "sources": {name: one.state_dict() for name, one in self._orders.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batch that follows the saved state.

        Raises:
            UserError: the sources, or the rows of one, differ from the state's.
        """
        before, now = set(state.get("sources", ())), set(self._orders)
        if before != now:
            raise UserError(
                f"data.sources must be those of the run, {_named(before)}, got {_named(now)} (each "
                "has a position of its own). Restore them, or start another run."
            )
        for name, order in self._orders.items():
            if state["fingerprints"][name] != order.fingerprint:
                raise UserError(
                    f"the rows of the source {name!r} are not those of the run (they were prepared "
                    "or filtered in another way, so its position says nothing). Restore the data, "
                    "or start another run."
                )
            order.load_state_dict(state["sources"][name])
        boundaries = list(self.curriculum.boundaries)
        if state["boundaries"] not in (boundaries, self._earlier_boundaries) and not self._rank:
            log.warning(
                "the phases of the curriculum ended after the optimizer steps %s and end now "
                "after %s: the length of the run has changed",
                *(state["boundaries"], boundaries),
            )
        self._earlier_boundaries = state["boundaries"]  # warn once: states are loaded twice
        self._batch = state["batch"]
        self._before_batch = self._position()

    def _next(self, optimizer_step: int) -> list[Prompt]:
        """Return this rank's share of a batch in the phase of an optimizer step, and move on."""
        self._phase = self.curriculum.index_at(optimizer_step)
        numbers = self._quotas[self._phase]
        taken = [
            prompt
            for name, order in self._orders.items()
            for prompt in order.take(numbers.get(name, 0))
        ]
        mixed = np.random.default_rng((self._seed, self._batch)).permutation(len(taken))
        self._batch += 1
        for name, order in self._orders.items():
            order.prepare_ahead(numbers.get(name, 0))
        return self._share([taken[index] for index in mixed])

    def _share(self, prompts: list[Prompt]) -> list[Prompt]:
        size = len(prompts) // self._world_size
        return prompts[self._rank * size : (self._rank + 1) * size]

    def _position(self) -> tuple[int, int, dict[str, Any]]:
        positions = {name: order.position() for name, order in self._orders.items()}
        return self._batch, self._phase, positions

    def _move_to(self, position: tuple[int, int, dict[str, Any]]) -> None:
        self._batch, self._phase, positions = position
        for name, place in positions.items():
            self._orders[name].move_to(place)

    def _check_sizes(self) -> None:
        check_sizes(self.batch_size, self._world_size, None, training=True)
        for numbers in self._quotas:
            for name, number in numbers.items():
                num_rows = self._orders[name].num_rows
                if num_rows is not None and number > num_rows:
                    raise UserError(
                        f"too few rows: the source {name!r} has {num_rows}, and its weight asks "
                        f"for {number} in every step. Provide more, lower its weight or "
                        "data.prompts_per_step."
                    )


def _named(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
