"""The built-in task: addition, ``12+34=`` -> ``46``. It needs no file and no network."""

from __future__ import annotations

import random

from lit_grpo.data.module import PromptDataModule, Split
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import UserError, check_range
from lit_grpo.types.keywords import checks_keywords

_MAX_SUMS = 1_000_000


@checks_keywords
class AdditionData(PromptDataModule):
    """Sums of two numbers with ``num_digits`` digits each.

    The held-out sums depend only on ``num_digits`` and ``validation_size``, so that runs with
    different seeds, and the SFT run before them, are validated on the same sums.

    Args:
        num_digits: Digits of each number, without leading zeros.
        train_size: Number of sums to train on, sampled by ``seed``; null takes all that are not
            held out.
        validation_size: Number of sums held out for validation and test.
        prompts_per_step: Prompts per rollout step, over all processes.
        validation_batch_size: Prompts per validation batch, over all processes; null means
            ``prompts_per_step``.
        seed: Seed of the choice and the order of the training sums.

    Raises:
        UserError: more sums are requested than exist or fit in memory.
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
        check_range("data.num_digits", num_digits, at_least=1)
        self.smallest = 10 ** (num_digits - 1) if num_digits > 1 else 0
        self.num_values = 10**num_digits - self.smallest
        num_sums = self.num_values**2
        self.validation_size = validation_size
        self.train_size = num_sums - validation_size if train_size is None else train_size
        if not 0 <= validation_size <= num_sums - self.train_size or self.train_size < 1:
            raise UserError(
                f"train_size ({self.train_size}) and validation_size ({validation_size}) must "
                f"share the {num_sums} sums that {num_digits} digits allow, with at least one to "
                "train on. Set data.train_size and data.validation_size."
            )
        check_range(
            "data.train_size",
            self.train_size,
            at_most=_MAX_SUMS,
            why=f"all sums of {num_digits} digits would not fit in memory",
        )

    def may_have(self, split: Split) -> bool:
        return split == "train" or self.validation_size > 0

    def rows(self, split: Split) -> list[Row]:
        sums = range(self.num_values**2)
        held_out = random.Random(0).sample(sums, self.validation_size)
        if split != "train":
            return [self._row(number) for number in held_out]
        enough = min(len(sums), self.train_size + self.validation_size)
        sampled = random.Random(self.seed).sample(sums, enough)
        excluded = set(held_out)
        train = [number for number in sampled if number not in excluded][: self.train_size]
        return [self._row(number) for number in train]

    def _row(self, number: int) -> Row:
        left, right = (self.smallest + value for value in divmod(number, self.num_values))
        text = f"{left}+{right}="
        columns = {"prompt": text, "answer": str(left + right), "left": left, "right": right}
        return Row(source="addition", number=number + 1, id=f"addition:{text}", columns=columns)
