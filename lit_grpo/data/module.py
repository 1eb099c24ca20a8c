"""Data modules: turn rows from files or datasets into loaders of prompts.

Constructing a data module reads nothing; ``setup`` reads the rows and tokenizes them with the
tokenizer of the policy.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from lightning.pytorch import LightningDataModule

from lit_grpo.data.columns import prompt_value
from lit_grpo.data.filters import failed_filter
from lit_grpo.data.loader import PromptLoader, TrainingLoader
from lit_grpo.data.prepared import Holdout, find_prepared, text_hash
from lit_grpo.data.prompts import PromptFormat, build_prompts
from lit_grpo.data.sources import Row, read_rows
from lit_grpo.types import Prompt, Tokenizer, UserError, check_range

logger = logging.getLogger("lit_grpo")

Split = Literal["train", "validation", "test"]

_SPLITS: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
}


class PromptDataModule(LightningDataModule, ABC):
    """Base of all data modules; a subclass provides the rows of each split.

    The position in the training data is saved here as well as in the loader, because a trainer
    that resumes from the very end of an epoch does not load the loader's state.
    """

    prompt_format = PromptFormat()

    def __init__(self, prompts_per_step: int, validation_batch_size: int | None, seed: int) -> None:
        super().__init__()
        check_range("data.seed", seed, at_least=0)
        self.prompts_per_step = prompts_per_step
        self.validation_batch_size = (
            prompts_per_step if validation_batch_size is None else validation_batch_size
        )
        self.seed = seed
        self._loaders: dict[Split, TrainingLoader] = {}

    @abstractmethod
    def rows(self, split: Split) -> list[Row]:
        """Return the rows of a split, the same on every rank; none if there is no such split."""

    def held_out(self) -> Holdout | None:
        """Return what must not be trained on; None if nothing is known to be held out."""
        return None

    def setup(self, stage: str) -> None:
        for split in _SPLITS.get(stage, ()):
            if prompts := self._read(split):
                self._loaders[split] = self._make_loader(split, prompts)
            elif stage != "fit" or split == "train":
                fix = "" if split == "train" else ", or data.validation_size to hold out rows"
                raise UserError(f"{split} data is needed, got none. Set data.{split}{fix}.")

    def train_dataloader(self) -> TrainingLoader:
        return self._loaders["train"]

    def val_dataloader(self) -> TrainingLoader | list[Any]:
        # Lightning skips validation when it gets an empty list.
        return self._loaders.get("validation", [])

    def test_dataloader(self) -> TrainingLoader:
        return self._loaders["test"]

    def state_dict(self) -> dict[str, Any]:
        return {"train": self._loaders["train"].state_dict()} if "train" in self._loaders else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "train" in self._loaders:
            self._loaders["train"].load_state_dict(state_dict["train"])

    def _read(
        self, split: Split, of_source: str = "", held_out: Holdout | None = None
    ) -> list[Prompt]:
        """Read and tokenize a split.

        Args:
            of_source: For the log, which source of a mixture it is of.
            held_out: What the other sources of the mixture hold out.

        Raises:
            UserError: a row to train on is held out.
        """
        assert self.trainer is not None, "the trainer calls setup"
        if self.trainer.is_global_zero:
            logger.info("reading and tokenizing the %s data%s", split, of_source)
        rows = self.rows(split)
        if not rows:
            return []
        if split == "train" and (held_out := held_out or self.held_out()):
            held_out.refuse(map(self._names, rows), f"the train data{of_source}")
        tokenizer = cast(Tokenizer, self.trainer.lightning_module.tokenizer)
        prompts = build_prompts(rows, tokenizer, self.prompt_format)
        if self.trainer.is_global_zero:
            limit = self.prompt_format.max_prompt_tokens
            _report(f"{split} data{of_source}", len(rows), len(prompts), limit)
        return prompts

    def _names(self, row: Row) -> tuple[str, str]:
        """Return the id of a row and the hash of its prompt, by which a held-out row is known."""
        known = row.columns.get("text_hash")
        if isinstance(known, str):
            return row.id, known
        try:
            return row.id, text_hash(prompt_value(row, self.prompt_format.columns))
        except UserError:  # a template writes the prompt from other columns
            return row.id, ""

    def _make_loader(self, split: Split, prompts: list[Prompt]) -> TrainingLoader:
        assert self.trainer is not None
        is_train = split == "train"
        return PromptLoader(
            prompts,
            self.prompts_per_step if is_train else self.validation_batch_size,
            seed=self.seed,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            training=is_train,
            # overfit_batches repeats the same few batches in every epoch.
            shuffle=not self.trainer.overfit_batches,  # type: ignore[attr-defined]
            epoch_limit=self.trainer.limit_train_batches,
        )


class PromptData(PromptDataModule):
    """Prompts from jsonl, parquet and csv files and Hugging Face datasets.

    Three layouts are recognised: verl's (``prompt``, ``reward_model.ground_truth``), GSM8K's
    (``question``, ``answer`` ending with ``#### 72``) and plain ``prompt``, ``answer``. Rewards
    can read every column of a row under its own name.

    Args:
        train: File, dataset or a list of them. A dataset is written ``id``, ``id:split`` or
            ``id:subset:split``, where ``id`` is a directory or an id on the Hub. Of a directory of
            prepared data its train split is read; what it holds out is refused.
        validation: The same for validation during training. Null means that of prepared data.
        test: The same for ``lit-grpo test``; null means the validation data, or the holdout of
            prepared data.
        where: Read only the rows of all splits that pass: by column ``[lowest, highest]``, of which
            either may be null, a value, or a list of values; for example ``{source: open}``.
        validation_size: Number or fraction of the rows of ``train`` to hold out for validation
            when ``validation`` is not set. The choice does not depend on ``seed``, so that runs
            with different seeds, and the SFT run before them, are validated on the same rows.
        prompts_per_step: Prompts per rollout step, over all processes.
        validation_batch_size: Prompts per validation batch, over all processes; null means
            ``prompts_per_step``.
        columns: ``{role: column}`` for the roles prompt, answer and id, where the layout is not
            recognised. ``a.b`` is the field b of the nested column a.
        template: jinja2 template of the prompt over the columns of the row, for example
            ``"Question: {{ question }}\\nAnswer:"``.
        system_prompt: First message of every conversation.
        chat_template_kwargs: Arguments of the chat template, such as ``{enable_thinking: false}``.
        tools_column: Column with the tools that a conversation's chat template describes: a list
            of JSON schemas, or the JSON text of one. Null passes none.
        chat: Turn each text prompt into the user message of a conversation, formatted by the
            tokenizer's chat template. A prompt that is a list of messages is always a
            conversation.
        max_prompt_tokens: Maximum prompt length; null means no limit.
        too_long: ``drop`` longer prompts (the log says how many), or ``refuse`` the data.
        seed: Seed of the order of the training prompts.
        require_answer: Refuse rows without a gold answer.
    """

    def __init__(
        self,
        train: str | list[str] | None = None,
        validation: str | list[str] | None = None,
        test: str | list[str] | None = None,
        *,
        where: dict[str, Any] | None = None,
        validation_size: int | float = 0,
        prompts_per_step: int = 64,
        validation_batch_size: int | None = None,
        columns: dict[str, str] | None = None,
        template: str | None = None,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools_column: str | None = "tools",
        chat: bool = False,
        max_prompt_tokens: int | None = None,
        too_long: Literal["drop", "refuse"] = "drop",
        seed: int = 0,
        require_answer: bool = True,
    ) -> None:
        super().__init__(prompts_per_step, validation_batch_size, seed)
        check_range("data.validation_size", validation_size, at_least=0)
        if validation and validation_size:
            raise UserError(
                f"validation_size must be 0 with validation={validation!r}, got "
                f"{validation_size} (the held-out rows would be unused). Set only one of "
                "data.validation and data.validation_size."
            )
        self.train = _as_list(train)
        self.validation = _as_list(validation)
        self.test = _as_list(test)
        self.where = where or {}
        self.validation_size = validation_size
        self.prompt_format = PromptFormat(
            columns=columns or {},
            template=template,
            system_prompt=system_prompt,
            chat_template_kwargs=chat_template_kwargs or {},
            tools_column=tools_column,
            chat=chat,
            max_prompt_tokens=max_prompt_tokens,
            too_long=too_long,
            require_answer=require_answer,
        )

    def rows(self, split: Split) -> list[Row]:
        if split == "test" and self.test:
            return self._read_all(self.test, "holdout")
        if split != "train" and self.validation:
            return self._read_all(self.validation, "validation")
        if split != "train" and not self.validation_size:
            implied = [one for one in self.train if Path(one).is_dir() and find_prepared(one)]
            return self._read_all(implied, "validation" if split == "validation" else "holdout")
        train, held_out = split_rows(self._read_all(self.train, "train"), self.validation_size)
        return train if split == "train" else held_out

    def _read_all(self, sources: list[str], split: str) -> list[Row]:
        """Return the rows that pass `where`; of a prepared directory, those of this split."""
        rows = [row for source in sources for row in _read_one(source, split)]
        kept = [row for row in rows if failed_filter(row.columns, self.where) is None]
        if rows and not kept and split == "train":
            raise UserError(
                f"where must keep some rows, got {self.where}, which none of the {len(rows)} rows "
                "passes. Set data.where."
            )
        return kept

    def held_out(self) -> Holdout | None:
        """Return what the directories of prepared data that are trained on hold out."""
        found = [one.holdout() for source in self.train if (one := find_prepared(source))]
        return reduce(or_, found) if found else None


def split_rows(rows: list[Row], held_out_size: int | float) -> tuple[list[Row], list[Row]]:
    """Split rows into those to train on and those held out, each in the original order.

    Raises:
        UserError: the size holds out no row, or leaves none to train on.
    """
    if not rows or not held_out_size:
        return rows, []
    is_fraction = isinstance(held_out_size, float)
    num_held_out = round(len(rows) * held_out_size) if is_fraction else int(held_out_size)
    if not 0 < num_held_out < len(rows):
        raise UserError(
            f"validation_size must be a fraction below 1 or a number below the {len(rows)} rows, "
            f"got {held_out_size}, which holds out {num_held_out}. Set data.validation_size."
        )
    held_out = set(np.random.default_rng(0).permutation(len(rows))[:num_held_out].tolist())
    return (
        [row for i, row in enumerate(rows) if i not in held_out],
        [row for i, row in enumerate(rows) if i in held_out],
    )


def _report(what: str, num_rows: int, num_prompts: int, limit: int | None) -> None:
    dropped = num_rows - num_prompts
    if dropped:
        logger.warning(
            "%s: %d rows, %d of them dropped (longer than max_prompt_tokens=%s)",
            *(what, num_rows, dropped, limit),
        )
    else:
        logger.info("%s: %d rows", what, num_rows)


def _as_list(sources: str | list[str] | None) -> list[str]:
    return [sources] if isinstance(sources, str) else list(sources or [])


def _read_one(source: str, split: str) -> Sequence[Row]:
    prepared = find_prepared(source)
    if prepared is None:
        return read_rows(source)
    path = Path(source).expanduser()
    return prepared.split(split if path == prepared.path else path.stem).rows()
