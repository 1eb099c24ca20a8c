"""Prompts of a streamed dataset, such as one of the Hub that does not fit on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from lit_grpo.data.loading.order import MAX_BUILT_AT_START
from lit_grpo.data.loading.stream import PromptStream
from lit_grpo.data.module import Split, Unlisted
from lit_grpo.data.prompt_data import PromptData
from lit_grpo.data.rows.given_rows import Given
from lit_grpo.data.rows.hf_datasets import open_dataset
from lit_grpo.data.rows.prepared import Holdout
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import Prompt, check_range, setting_error
from lit_grpo.types.tokenizer import Tokenizer


class StreamData(PromptData):
    """Prompts of a Hugging Face dataset that is never stored or read as a whole.

    Every process reads all rows and takes its part of each step. After a resume the rows come
    exactly as they would have: the shard is read again up to the place, without training. Rows that
    are too long, filtered or held out are skipped.

    Args:
        train: A dataset, ``id``, ``id:split`` or ``id:subset:split``, where ``id`` is an id on the
            Hub or a directory of files.
        validation: As in `PromptData`; these rows are read as a whole.
        test: As in `PromptData`.
        window: Rows that are permuted together, and kept in memory; shards are also permuted.
        steps_per_epoch: Rollout steps that count as an epoch, as the number of rows is unknown.
        settings: The other arguments of `PromptData`.

    Raises:
        UserError: a setting is out of range, or there is no such dataset.
    """

    def __init__(
        self,
        train: str | None = None,
        validation: Given = None,
        test: Given = None,
        *,
        window: int = 10_000,
        steps_per_epoch: int = 1_000,
        **settings: Any,
    ) -> None:
        super().__init__(train, validation, test, **settings)
        check_range("data.window", window, at_least=1)
        check_range("data.steps_per_epoch", steps_per_epoch, at_least=1)
        if self.validation_size:
            why = "the number of rows of a stream is unknown; set data.validation"
            raise setting_error("data.validation_size", "0", self.validation_size, why)
        if len(self.train) > 1:
            why = "MixtureData takes several"
            raise setting_error("data.train", "one dataset", self.train, why)
        if not all(isinstance(one, str) for one in self.train):
            why = "PromptData takes them"
            raise setting_error("data.train", "the name of a dataset", "rows in memory", why)
        if self.train and Path(str(self.train[0])).expanduser().is_file():
            why = "PromptData reads single files; a directory of its files can be streamed"
            rule = "a directory of files or an id on the Hub"
            raise setting_error("data.train", rule, f"the file {self.train[0]}", why)
        self.window = window
        self.steps_per_epoch = steps_per_epoch

    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split; for the stream, only the first ones."""
        if split != "train":
            return super().rows(split)
        return [*islice(self._open(None).rows(0, 0), MAX_BUILT_AT_START)] if self.train else []

    def _read(
        self, split: Split, source: str = "", held_out: Holdout | None = None
    ) -> list[Prompt] | Unlisted:
        if split != "train":
            return super()._read(split, source, held_out)
        assert self.trainer is not None, "the trainer calls setup"
        held_out = held_out or self.held_out()
        return self._open(held_out, source) if self.train else []

    def _open(self, held_out: Holdout | None, source: str = "") -> PromptStream:
        text = str(self.train[0])
        name, dataset = open_dataset(text, streaming=True)
        module = self.trainer and self.trainer.lightning_module
        return PromptStream(
            text=text,
            name=name,
            dataset=dataset.with_format(None),
            tokenizer=cast(Tokenizer, module and module.tokenizer),
            prompt_format=self.prompt_format,
            where=self.where,
            window=self.window,
            epoch_size=self.steps_per_epoch * self.prompts_per_step,
            held_out=held_out,
            source=source,
        )
