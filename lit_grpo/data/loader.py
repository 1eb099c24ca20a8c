"""A list of prompts -> batches in an order that a seed and the epoch fix, with a position to save.

Every rank yields its share of the same batches. Nothing here knows files or tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lit_grpo.types import Prompt, UserError


class PromptLoader:
    """A sized, stateful loader of ``list[Prompt]``.

    All ranks yield equally many batches, each a contiguous, nearly equal part of the same
    ``batch_size`` prompts.

    In training an iteration is one epoch, whose incomplete last batch is left out; the next one is
    the next epoch. An iteration that was broken off is continued by the next one, as is a loaded
    state: what comes next depends on (seed, epoch, position) alone, however often a trainer asks
    for an iterator and wherever it believes that its epochs end.

    Otherwise every iteration starts anew, in the given order, and each prompt comes exactly once.
    A last batch with fewer prompts than ranks joins the one before, so that no rank ever gets an
    empty batch.

    Args:
        prompts: The same prompts in the same order on every rank.
        batch_size: Prompts a batch over all ranks.
        shuffle: Train on the permutation of (seed, epoch) rather than on the given order.
        epoch_limit: Where a training epoch ends early, in batches (int) or as a fraction of them
            (float), like ``Trainer.limit_train_batches``. The trainer applies its limit to
            ``len``, which is of the whole epoch.

    Raises:
        ValueError: too few prompts for one batch, or a batch that the ranks cannot share.
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
        self.epoch = 0
        self.position = 0
        self._before_batch = self.state_dict()
        self._min_batch_size = batch_size if training else world_size
        self._check_sizes()
        limit = epoch_limit if isinstance(epoch_limit, int) else int(len(self) * epoch_limit)
        is_limited = training and 0 < limit < len(self)
        self._epoch_size = limit * batch_size if is_limited else len(prompts)

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on every rank."""
        full, rest = divmod(len(self.prompts), self.batch_size)
        return full + (rest >= self._min_batch_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        if not self.training:
            self.position = 0
        epoch, order = self.epoch, self._order()
        while self.epoch == epoch:
            self._before_batch = self.state_dict()
            yield self._hand_out(order, self._next_stop())

    def take(self, num_prompts: int) -> list[Prompt]:
        """So many further prompts for each rank, out of turn: the next batch begins behind them.

        Every rank must call this with the same number, of at most its share of a batch. An epoch
        that is too short for them ends before.
        """
        num_over_ranks = num_prompts * self.world_size
        if self._epoch_size - self.position < num_over_ranks:
            self.epoch, self.position = self.epoch + 1, 0
        return self._hand_out(self._order(), self.position + num_over_ranks)

    def peek(self, number: int) -> list[Prompt]:
        """This rank's share of the number-th further batch, 1 for the next; takes nothing."""
        state, before = self.state_dict(), self._before_batch
        for _ in range(number):
            prompts = self._hand_out(self._order(), self._next_stop())
        self.load_state_dict(state)
        self._before_batch = before
        return prompts

    def rewind(self) -> None:
        """Take back the last batch and what was taken since: a state saved now is before them."""
        self.load_state_dict(self._before_batch)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the prompts that all ranks together have taken of it."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next iteration go on where the state was taken."""
        self.epoch = state["epoch"]
        self._advance(state["position"])

    def _hand_out(self, order: np.ndarray, stop: int) -> list[Prompt]:
        """This rank's share of the prompts up to a position."""
        start = self.position
        # Before the prompts leave: a state saved after them points behind them.
        self._advance(stop)
        return [self.prompts[i] for i in self._share(order[start:stop])]

    def _advance(self, position: int) -> None:
        """Move on to a position, or to the next epoch when no batch is left behind it."""
        if self._epoch_size - position < self._min_batch_size:
            self.epoch, self.position = self.epoch + 1, 0
        else:
            self.position = position

    def _next_stop(self) -> int:
        stop = self.position + self.batch_size
        is_last = self._epoch_size - stop < self._min_batch_size
        return self._epoch_size if is_last and not self.training else stop

    def _order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.prompts))
        return np.random.default_rng((self.seed, self.epoch)).permutation(len(self.prompts))

    def _share(self, batch: np.ndarray) -> np.ndarray:
        first, last = (len(batch) * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return batch[first:last]

    def _check_sizes(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.world_size:
            name = "prompts_per_step" if self.training else "validation_batch_size"
            raise UserError(
                f"{name} must be a positive multiple of the {self.world_size} processes, got "
                f"{self.batch_size} (each process takes an equal share). Set data.{name}."
            )
        if len(self.prompts) < self._min_batch_size:
            fix = "lower data.prompts_per_step" if self.training else "use fewer processes"
            raise UserError(
                f"{len(self.prompts)} prompts are too few, one batch on {self.world_size} "
                f"processes needs {self._min_batch_size} (none may go without). Give more rows, "
                f"or {fix}."
            )
