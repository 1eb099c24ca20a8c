"""Tokenize prompts when they are needed, for data with too many rows to do it at the start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import overload

from lit_grpo.data.prompts.chat import check_template_kwargs
from lit_grpo.data.prompts.prompt_format import PromptFormat, build_prompt, check_tools_column
from lit_grpo.data.rows.gold import gold_answers
from lit_grpo.data.rows.mapped import MappedRows
from lit_grpo.types import Prompt
from lit_grpo.types.tokenizer import Tokenizer


class LazyPrompts(Sequence[Prompt | None]):
    """Prompts that are built when they are needed; None instead of one that is too long.

    Args:
        rows: The rows.
        tokenizer: As for `build_prompts`.
        prompt_format: How rows become prompts.
        source: The name of the source that the prompts carry.

    Raises:
        UserError: for the reasons of `build_prompts`, also when a prompt is built.
    """

    def __init__(
        self,
        rows: MappedRows,
        tokenizer: Tokenizer,
        prompt_format: PromptFormat,
        source: str = "",
    ) -> None:
        if tokenizer.chat_template is not None:
            check_template_kwargs(prompt_format.chat_template_kwargs, tokenizer)
        check_tools_column(rows[:1], prompt_format.tools_column)
        self.rows = rows
        self.source = source
        self._tokenizer = tokenizer
        self._format = prompt_format
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._ahead: dict[int, Future[Prompt | None]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Prompt | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt | None]: ...

    def __getitem__(self, index: int | slice) -> Prompt | None | list[Prompt | None]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        known = self._ahead.pop(index, None)
        return self._build(index) if known is None else known.result()

    def prepare(self, indices: Iterable[int]) -> None:
        """Begin to build the prompts that will be asked for next, in a thread."""
        known, self._ahead = self._ahead, {}
        for index in indices:
            begun = known.pop(index) if index in known else None
            self._ahead[index] = begun or self._worker.submit(self._build, index)
        for one in known.values():
            one.cancel()

    def ids(self) -> Iterator[str]:
        return (one["id"] for one in self.rows.columns("id"))

    def _build(self, index: int) -> Prompt | None:
        row, limit = self.rows[index], self._format.max_prompt_tokens
        required = self._format.require_answer
        (answer,) = gold_answers([row], self._format.columns, required=required)
        prompt = build_prompt(row, answer, self._tokenizer, self._format)
        if limit is not None and len(prompt.token_ids) > limit:
            return None
        return replace(prompt, source=self.source, row=index)
