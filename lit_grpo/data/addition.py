"""The built-in task: addition, ``12+34=`` -> ``46``. It needs no file and no network."""

from __future__ import annotations

import random

from lit_grpo.data.module import PromptDataModule, Split
from lit_grpo.data.sources import Row
from lit_grpo.types import UserError

_MAX_PAIRS = 1_000_000


class AdditionData(PromptDataModule):
    """Sums of two numbers with ``num_digits`` digits each.

    Which sums are held out depends on ``num_digits`` and ``validation_size`` only: runs with other
    seeds and a warm-up before them hold out the same ones.

    Args:
        num_digits: Digits of each number, without leading zeros.
        train_size: Sums to train on, sampled by ``seed``; all that are not held out when not given.
        validation_size: Sums held out for validation and test.
        prompts_per_step: Prompts a rollout step, over all processes.
        validation_batch_size: Prompts a validation batch, over all processes; prompts_per_step
            when not given.
        seed: Choice and order of the training sums.

    Raises:
        ValueError: more sums asked for than there are, or more than fit in memory.
    """

    def __init__(
        self,
        num_digits: int = 2,
        *,
        train_size: int | None = None,
        validation_size: int = 256,
        prompts_per_step: int = 64,
        validation_batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(prompts_per_step, validation_batch_size, seed)
        if num_digits < 1:
            raise UserError(f"num_digits must be >= 1, got {num_digits}. Set data.num_digits.")
        self.smallest = 10 ** (num_digits - 1) if num_digits > 1 else 0
        self.num_values = 10**num_digits - self.smallest
        num_pairs = self.num_values**2
        self.validation_size = validation_size
        self.train_size = num_pairs - validation_size if train_size is None else train_size
        if not 0 <= validation_size <= num_pairs - self.train_size or self.train_size < 1:
            raise UserError(
                f"train_size ({self.train_size}) and validation_size ({validation_size}) must "
                f"share the {num_pairs} sums that {num_digits} digits allow, with at least one to "
                "train on. Set data.train_size and data.validation_size."
            )
        if self.train_size > _MAX_PAIRS:
            raise UserError(
                f"train_size must be <= {_MAX_PAIRS}, got {self.train_size} (all sums of "
                f"{num_digits} digits would not fit in memory). Set data.train_size."
            )

    def rows(self, split: Split) -> list[Row]:
        pairs = range(self.num_values**2)
        held_out = random.Random(0).sample(pairs, self.validation_size)
        if split != "train":
            return [self._row(pair) for pair in held_out]
        enough = min(len(pairs), self.train_size + self.validation_size)
        chosen = random.Random(self.seed).sample(pairs, enough)
        hidden = set(held_out)
        train = [pair for pair in chosen if pair not in hidden][: self.train_size]
        return [self._row(pair) for pair in train]

    def _row(self, pair: int) -> Row:
        left, right = (self.smallest + value for value in divmod(pair, self.num_values))
        text = f"{left}+{right}="
        columns = {"prompt": text, "answer": str(left + right), "left": left, "right": right}
        return Row(source="addition", number=pair + 1, id=f"addition:{text}", columns=columns)
