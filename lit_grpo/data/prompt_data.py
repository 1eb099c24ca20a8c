"""Prompts from files and datasets of any layout."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import reduce
from itertools import compress
from operator import or_
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.data.module import PromptDataModule, Split
from lit_grpo.data.prompts.prompt_format import PromptFormat
from lit_grpo.data.rows.filters import absent_column, failed_filter, with_columns
from lit_grpo.data.rows.given_rows import Given, Source, as_sources
from lit_grpo.data.rows.gold import gold_answers
from lit_grpo.data.rows.mapped import MappedRows
from lit_grpo.data.rows.prepared import HOLDOUT, Holdout, PreparedDir, PreparedSplit, find_prepared
from lit_grpo.data.rows.sources import Row, read_rows
from lit_grpo.types import UserError, check_range
from lit_grpo.types.field_types import check_value
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)

MAX_ROWS_IN_MEMORY = 50_000
"""Prepared data with more rows to train on are tokenized while they are trained on."""
HOLDOUT_SEED = 20_402
"""Seed of the choice of held-out rows. A small one could be a run's seed, whose first epoch
would begin with the rows that another run has held out."""


@checks_keywords
class PromptData(PromptDataModule):
    """Prompts from jsonl, parquet and csv files and Hugging Face datasets.

    Three layouts are recognised: verl's (``prompt``, ``reward_model.ground_truth``), GSM8K's
    (``question``, ``answer`` ending with ``#### 72``) and plain ``prompt``, ``answer``. Rewards
    can read every column of a row under its own name.

    Args:
        train: File, dataset or a list of them. A dataset is written ``id``, ``id:split`` or
            ``id:subset:split``, where ``id`` is a directory or an id on the Hub. Of a directory of
            prepared data its train split is read; what it holds out is refused. In Python it may
            also be the rows: a list of dicts, a ``datasets.Dataset`` or a DataFrame, or a list of
            such tables.
        validation: The same for validation during training. Null means the validation split of
            prepared data.
        test: The same for ``lit-grpo test``; null means the validation data, or the holdout of
            prepared data.
        where: Read only the rows of all splits that pass: by column ``[lowest, highest]``, of which
            either may be null, a value, or a list of values; for example ``{source: open}``. A
            filter by a column that only the training data have, such as ``pass_rate``, does not
            apply to the others.
        holdout: File or list of files ``holdout_ids.json``, or directories of prepared data: what
            they hold out is not trained on either. Those of ``train``, ``validation`` and ``test``
            need not be named.
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
        max_prompt_tokens: Maximum prompt length; null means no limit. Prepared data with more than
            50,000 rows to train on need one: they are tokenized when a step needs them, and longer
            prompts are passed over then.
        too_long: ``drop`` longer prompts (the log says how many), or ``refuse`` the data.
        seed: Seed of the order of the training prompts.
        require_answer: Refuse rows without a gold answer.
    """

    def __init__(
        self,
        train: Given = None,
        validation: Given = None,
        test: Given = None,
        *,
        where: dict[str, Any] | None = None,
        holdout: str | list[str] | None = None,
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
        check_value("data.where", where, dict | None)
        check_value("data.holdout", holdout, str | list[str] | None)
        self.train = as_sources("train", train)
        self.validation = as_sources("validation", validation)
        self.test = as_sources("test", test)
        if self.validation and validation_size:
            named = ", ".join(map(str, self.validation))
            raise UserError(
                f"validation_size must be 0 with validation={named}, got {validation_size} (the "
                "held-out rows would be unused). Set only one of data.validation and "
                "data.validation_size."
            )
        self.where = where or {}
        self.holdout = [holdout] if isinstance(holdout, str) else [*(holdout or ())]
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

    def may_have(self, split: Split) -> bool:
        return bool(self._sources(split)[0])

    def is_held_out_of_train(self, split: Split) -> bool:
        return self._sources(split)[1] == "train"

    def rows(self, split: Split) -> Sequence[Row]:
        sources, prepared = self._sources(split)
        if prepared == "train":
            _refuse_holdouts(sources)
        if split == "test" and prepared != "holdout":
            _log_no_test_data()
        rows = self._read_all(sources, prepared)
        if prepared != "train":
            return rows
        form = self.prompt_format
        is_split = bool(self.validation_size) and not isinstance(rows, MappedRows)
        if rows and is_split and form.require_answer:
            gold_answers(rows, form.columns, required=True)  # counts all rows, not one split's
        train, held_out = split_rows(rows, self.validation_size)
        return train if split == "train" else held_out

    def _sources(self, split: Split) -> tuple[list[Source], str]:
        """Return the sources of a split's rows, and the split's name in prepared data."""
        if split == "test" and self.test:
            return self.test, "holdout"
        if split != "train" and self.validation:
            return self.validation, "validation"
        if split == "train" or self.validation_size:
            return self.train, "train"
        implied = [one for one in self.train if _is_prepared_directory(one)]
        return implied, "validation" if split == "validation" else "holdout"

    def _read_all(self, sources: list[Source], split: str) -> Sequence[Row]:
        """Return the rows that pass `where`; from a prepared directory, only this split's."""
        rows = self._map(sources, split) or [
            row for source in sources for row in _read_one(source, split)
        ]
        where = self.where
        if split != "train":
            where = with_columns(where, [row.columns for row in rows])
        kept = (
            rows.where(where)
            if isinstance(rows, MappedRows)
            else [row for row in rows if failed_filter(row.columns, where) is None]
        )
        is_given = split == "train" or sources in (self.validation, self.test)
        if rows and not kept and is_given:
            passed = f"none of the {len(rows)} rows passes."
            reason = absent_column(where, [row.columns for row in rows]) or passed
            of = "" if split == "train" else " of the held-out data"
            raise UserError(
                f"where must keep some rows{of}, got {self.where}, but {reason} Set data.where."
            )
        return kept

    def _map(self, sources: list[Source], split: str) -> MappedRows | None:
        """Return the rows of one prepared source with very many; None for all others.

        Raises:
            UserError: no limit is set for the lengths of the prompts, which are not known in
                advance.
        """
        prepared = _prepared_split(sources[0], split) if len(sources) == 1 else None
        if split != "train" or prepared is None or prepared.num_rows <= MAX_ROWS_IN_MEMORY:
            return None
        if self.trainer is not None and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            return None
        if self.prompt_format.max_prompt_tokens is None or self.prompt_format.too_long != "drop":
            raise UserError(
                f"{prepared.path} has {prepared.num_rows:,} rows, and more than "
                f"{MAX_ROWS_IN_MEMORY:,} are tokenized when a step needs them, so that long ones "
                "cannot be found before. Set data.max_prompt_tokens, with data.too_long: drop."
            )
        return MappedRows(prepared.path)

    def held_out(self) -> Holdout | None:
        """Return the rows that `holdout` or any of the named prepared data hold out."""
        named = (*self.train, *self.validation, *self.test)
        found = [one.holdout() for source in named if (one := _prepared(source))]
        found += [Holdout.of(source) for source in self.holdout]
        return reduce(or_, found) if found else None


def split_rows(
    rows: Sequence[Row], held_out_size: int | float
) -> tuple[Sequence[Row], Sequence[Row]]:
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
    is_held_out = np.zeros(len(rows), dtype=bool)
    is_held_out[np.random.default_rng(HOLDOUT_SEED).permutation(len(rows))[:num_held_out]] = True
    if isinstance(rows, MappedRows):
        return rows.select(~is_held_out), [*rows.select(is_held_out)]
    return [*compress(rows, ~is_held_out)], [*compress(rows, is_held_out)]


def _prepared(source: Source) -> PreparedDir | None:
    return find_prepared(source) if isinstance(source, str) else None


def _is_prepared_directory(source: Source) -> bool:
    prepared = _prepared(source)
    return prepared is not None and isinstance(source, str) and Path(source).expanduser().is_dir()


def _refuse_holdouts(sources: Sequence[Source]) -> None:
    """Refuse to train on the file of a holdout, before it fails any other check."""
    for source in (one for one in sources if isinstance(one, str)):
        path = Path(source).expanduser()
        if path.stem == HOLDOUT and path.is_file() and find_prepared(source):
            why = "its rows are held out, and an evaluation on them would be too good"
            fix = f"Set it to {path.parent} to train on the split train."
            raise UserError(f"data.train must not be a holdout, got {source} ({why}). {fix}")


def _read_one(source: Source, split: str) -> Sequence[Row]:
    if not isinstance(source, str):
        return source.rows()
    prepared = _prepared_split(source, split)
    return read_rows(source) if prepared is None else prepared.rows()


def _prepared_split(source: Source, split: str) -> PreparedSplit | None:
    """Return this split of a prepared directory, or the split that a file holds; else None."""
    if not isinstance(source, str) or (prepared := find_prepared(source)) is None:
        return None
    path = Path(source).expanduser()
    return prepared.split(split if path == prepared.path else path.stem)


@rank_zero_only
def _log_no_test_data() -> None:
    log.info("test data: the validation data, since data.test names no others")
