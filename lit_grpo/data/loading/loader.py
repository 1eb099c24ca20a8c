"""Batch prompts in an order that seed and epoch determine, with a position that can be saved.

Every rank gets its share of the same batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lit_grpo.data.loading.contents import describe_rows
from lit_grpo.data.loading.order import Permutations
from lit_grpo.types import Prompt, UserError, setting_error
from lit_grpo.types.rollouts import GroupResult

Order = NDArray[np.integer[Any]]
"""Indices of prompts."""


class TrainingLoader(Protocol):
    """The loader that training needs: a sized, stateful iterable of ``list[Prompt]``.

    Every rank has one with the same state, and gets its share of the same batches.
    """

    batch_size: int
    """Prompts per batch, over all ranks."""
    sources: tuple[str, ...] = ()
    """The sources of a mixture; empty without one."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch. Lightning would read ahead without it."""

    def __iter__(self) -> Iterator[list[Prompt]]: ...

    def take(self, needed: Mapping[str, int]) -> dict[str, list[Prompt]]:
        """Return extra prompts for this rank by source; the next batch starts after them.

        Every rank must call this with the same numbers.
        """

    def peek(self, number: int) -> list[Prompt]:
        """Return this rank's share of an upcoming batch, 1 for the next, without taking it."""

    def rewind(self) -> None:
        """Undo the last batch and every `take` since, so that they come again."""

    @property
    def num_prompts(self) -> int:
        """The number of prompts to train on."""

    def some_prompts(self) -> Sequence[Prompt]:
        """Return the prompts that a run is checked with at its start.

        These are all that are in memory, or a few thousand spread over data that are not.
        """

    def find(self, ids: Collection[str]) -> dict[str, Prompt]:
        """Return the prompts with these ids; skip ids that are no longer in the data."""

    @property
    def shares(self) -> dict[str, float]:
        """Source of a mixture -> its share of the last batch, before one of the first."""
        return {}

    @property
    def is_adaptive(self) -> bool:
        """Whether the order depends on results."""
        return False

    def record(self, results: Sequence[GroupResult]) -> None:
        """Record the results of a finished step from all ranks, in their order."""
        return

    def metrics(self) -> dict[str, float]:
        """Return what the last batch was made of, for the metrics of its step."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return what decides which prompts come when, as plain values by name."""
        return {"prompts_per_step": self.batch_size}

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batch that follows the saved state."""


class PromptLoader(TrainingLoader):
    """A loader of prompts that are in memory.

    All ranks get the same number of batches. Each batch is a contiguous, nearly equal part of the
    same ``batch_size`` prompts.

    In training, one iteration is one epoch of ``len`` batches. Without `take` that is one pass over
    the prompts, whose incomplete last batch is dropped; prompts that are taken in between shift the
    passes, and not the epochs. An interrupted iteration continues in the next one, and so does a
    loaded state. The next batch therefore depends only on (seed, pass, position), no matter how
    often a trainer creates an iterator or where it ends its own epochs.

    In validation, every iteration starts from the beginning in the given order and yields each
    prompt exactly once. A last batch with fewer prompts than ranks is merged into the one before,
    so that no rank ever gets an empty batch.

    Args:
        prompts: The same prompts in the same order on every rank.
        batch_size: Prompts per batch, over all ranks.
        seed: Seed of the permutation of each pass.
        rank: Rank of this process.
        world_size: Number of processes.
        training: Whether to iterate as in training rather than as in validation.
        shuffle: Train on the permutation of (seed, pass) rather than in the given order.
        epoch_limit: Length of a training epoch in batches (int) or as a fraction of all batches
            (float), like ``Trainer.limit_train_batches``. ``len`` still counts a whole
            epoch because the trainer applies its limit to it.

    Raises:
        UserError: there are too few prompts for one batch, or the ranks cannot share a batch.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        training: bool = True,
        shuffle: bool = True,
        epoch_limit: int | float = 1.0,
    ) -> None:
        self.prompts = prompts
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.training = training
        self.shuffle = shuffle and training
        self._num_batches, self._pass, self._position = 0, 0, 0
        self._permutation = Permutations(len(prompts), (seed,))
        self._before_batch = self.state_dict()
        self._min_batch_size = batch_size if training else world_size
        check_sizes(batch_size, world_size, len(prompts), training=training)
        limit = epoch_limit if isinstance(epoch_limit, int) else int(len(self) * epoch_limit)
        is_limited = training and 0 < limit < len(self)
        self._epoch_size = limit if is_limited else len(self)
        self._pass_size = limit * batch_size if is_limited else len(prompts)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same on every rank."""
        full, rest = divmod(len(self.prompts), self.batch_size)
        return full + (rest >= self._min_batch_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        if not self.training:
            self._num_batches = self._position = 0
        epoch = self._num_batches // self._epoch_size
        while self._num_batches // self._epoch_size == epoch:
            self._before_batch = self.state_dict()
            # Count first: a state saved while the caller uses these prompts must point past them.
            self._num_batches += 1
            yield self._take_until(self._next_stop())

    def take(self, needed: Mapping[str, int]) -> dict[str, list[Prompt]]:
        """Return extra prompts for this rank: the next ones, whatever source is named.

        There are at most as many as its share of a batch. If the pass has too few prompts left,
        they come from the next one.
        """
        return {source: self._take(number) for source, number in needed.items()}

    def _take(self, num_prompts: int) -> list[Prompt]:
        num_over_ranks = num_prompts * self.world_size
        if self._pass_size - self._position < num_over_ranks:
            self._pass, self._position = self._pass + 1, 0
        return self._take_until(self._position + num_over_ranks)

    def peek(self, number: int) -> list[Prompt]:
        state, before = self.state_dict(), self._before_batch
        for _ in range(number):
            prompts = self._take_until(self._next_stop())
        self.load_state_dict(state)
        self._before_batch = before
        return prompts

    def rewind(self) -> None:
        self.load_state_dict(self._before_batch)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def some_prompts(self) -> Sequence[Prompt]:
        """Return all prompts."""
        return self.prompts

    def find(self, ids: Collection[str]) -> dict[str, Prompt]:
        wanted = set(ids)
        return {prompt.id: prompt for prompt in self.prompts if prompt.id in wanted}

    def settings(self) -> dict[str, Any]:
        """Return also the seed and the rows; the order depends on all of these."""
        return super().settings() | {"seed": self.seed, "rows": describe_rows(self.prompts)}

    def state_dict(self) -> dict[str, int]:
        """Return the batches so far, the pass, and how many of its prompts all ranks have taken."""
        return {"batches": self._num_batches, "epoch": self._pass, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration continue where the state was saved."""
        self._pass = state["epoch"]
        of_passes = self._pass * self._epoch_size + state["position"] // self.batch_size
        self._num_batches = state.get("batches", of_passes)  # not in states of earlier releases
        self._advance(state["position"])

    def _take_until(self, stop: int) -> list[Prompt]:
        """Return this rank's share of the prompts from here to a position, and move there."""
        taken = self._share(self._order()[self._position : stop])
        self._advance(stop)
        return [self.prompts[i] for i in taken]

    def _advance(self, position: int) -> None:
        """Move to a position, or to the next pass if no batch is left after it."""
        if self._pass_size - position < self._min_batch_size:
            self._pass, self._position = self._pass + 1, 0
        else:
            self._position = position

    def _next_stop(self) -> int:
        stop = self._position + self.batch_size
        is_last = self._pass_size - stop < self._min_batch_size
        return self._pass_size if is_last and not self.training else stop

    def _order(self) -> Order:
        return self._permutation(self._pass) if self.shuffle else self._given_order

    @cached_property
    def _given_order(self) -> Order:
        return np.arange(len(self.prompts))

    def _share(self, batch: Order) -> Order:
        first, last = (len(batch) * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return batch[first:last]


def check_sizes(
    batch_size: int, world_size: int, num_prompts: int | None, *, training: bool
) -> None:
    """Check that every process gets an equal share of a batch.

    Args:
        num_prompts: None if it is not known.

    Raises:
        UserError: the processes cannot share a batch, or there are too few prompts for one.
    """
    if batch_size < 1 or batch_size % world_size:
        name = "prompts_per_step" if training else "validation_batch_size"
        rule, why = ">= 1", ""
        if world_size > 1:
            rule = f"a positive multiple of {world_size}, the number of processes"
            why = "each takes an equal share"
        raise setting_error(f"data.{name}", rule, batch_size, why)
    needed = batch_size if training else world_size
    if num_prompts is not None and num_prompts < needed:
        kind, fix = "training", "Provide more rows, or lower data.prompts_per_step."
        if not training:
            kind = "held-out"
            fix = "Hold out more rows (data.validation_size, or its file), or use fewer processes."
        raise UserError(
            f"too few {kind} prompts: {num_prompts}; one batch on {world_size} process(es) needs "
            f"{needed} (every process needs a share). {fix}"
        )
