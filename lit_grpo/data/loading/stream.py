"""Prompts of a dataset that is read as it is trained on, with a position that can be saved."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np

from lit_grpo.data.loading.order import MAX_BUILT_AT_START, RowOrder, of_seeds
from lit_grpo.data.prompts.prompt_format import PromptFormat, build_prompt
from lit_grpo.data.rows.filters import absent_column, failed_filter
from lit_grpo.data.rows.gold import gold_answers
from lit_grpo.data.rows.prepared import Holdout, holdout_keys
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import Prompt, UserError
from lit_grpo.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PromptStream:
    """The prompts of a dataset in shards, each of which is read from its start."""

    text: str
    """The dataset, as written in the config."""
    name: str
    dataset: Any
    """An ``IterableDataset`` of `datasets`."""
    tokenizer: Tokenizer
    prompt_format: PromptFormat
    where: Mapping[str, Any]
    window: int
    """Rows that are permuted together."""
    epoch_size: int
    """Prompts that are taken for an epoch."""
    held_out: Holdout | None
    source: str = ""
    """The name of the source that the prompts carry."""

    def __len__(self) -> int:
        return self.epoch_size

    @property
    def num_shards(self) -> int:
        return int(self.dataset.num_shards)

    def rows(self, shard: int, start: int) -> Iterator[Row]:
        """Read the rows of a shard, starting at the row with this number."""
        found = self.dataset.shard(num_shards=self.num_shards, index=shard).skip(start)
        try:
            for number, columns in enumerate(found, start):
                name = f"{self.name}:{shard}:{number}"
                yield Row(source=self.text, number=number + 1, id=name, columns=columns)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.text} could not be read to its end: {error}. The run goes on from its last "
                "checkpoint if it is started again."
            ) from error

    def build(self, row: Row) -> Prompt | None:
        """Return the prompt of a row; None if it is filtered, too long or held out."""
        if failed_filter(row.columns, self.where) is not None:
            return None
        if self.held_out is not None and self.held_out.has(*holdout_keys(row.id, row.columns)):
            return None
        form, limit = self.prompt_format, self.prompt_format.max_prompt_tokens
        (answer,) = gold_answers([row], form.columns, required=form.require_answer)
        prompt = build_prompt(row, answer, self.tokenizer, form)
        if limit is not None and len(prompt.token_ids) > limit:
            return None
        return replace(prompt, source=self.source)


@dataclass(frozen=True, order=True)
class Place:
    """A position in a stream."""

    epoch: int = 0
    shard: int = 0
    """How many shards of the epoch are done."""
    window: int = 0
    row: int = 0


class StreamOrder(RowOrder):
    """The prompts of a stream: shards, and in windows of a shard the rows, permuted in each epoch.

    A saved position is found again by reading its shard up to its window, whatever `datasets` keeps
    of a stream; only numbers are saved.

    Args:
        name: As in `RowOrder`.
        stream: The same on every rank.
        seed: With the name, the seed of the permutations.
    """

    num_rows = None

    def __init__(self, name: str, stream: PromptStream, seed: Sequence[int]) -> None:
        self.name = name
        self.epoch_size = stream.epoch_size
        about = f"{stream.text} {stream.num_shards} {stream.window} {dict(stream.where)}"
        self.fingerprint = hashlib.sha256(about.encode()).hexdigest()[:16]
        self._stream = stream
        self._seed = (*seed, crc32(name.encode()))
        self._place = Place()
        self._windows: dict[Place, list[Row]] = {}
        """The last windows that were read, by their first row."""
        self._reading: tuple[Place, Iterator[Row]] | None = None
        """The window that comes next in a shard that is being read."""

    def describe_rows(self) -> str:
        return self.fingerprint + of_seeds(self._seed)

    def take(self, number: int) -> list[Prompt]:
        taken: list[Prompt] = []
        begun = self._place.epoch
        while len(taken) < number:
            if self._place.epoch > begun + 1 and not taken:
                rows = [row.columns for window in self._windows.values() for row in window]
                absent = absent_column(self._stream.where, rows)
                raise UserError(
                    f"{self._stream.text} has no prompt to train on: all rows are filtered, too "
                    "long or held out. Check data.where and data.max_prompt_tokens."
                    + (f" Among the last rows read {absent}" if absent else "")
                )
            row = self._next_row()
            prompt = None if row is None else self._stream.build(row)
            if prompt is not None:
                taken.append(prompt)
        return taken

    def prepare_ahead(self, number: int) -> None:
        return

    def position(self) -> Place:
        return self._place

    def move_to(self, position: Place) -> None:
        self._place = position

    def some_prompts(self, limit: int) -> Sequence[Prompt]:
        rows = [*islice(self._stream.rows(0, 0), min(limit, MAX_BUILT_AT_START))]
        if rows and (absent := absent_column(self._stream.where, [row.columns for row in rows])):
            log.warning("data.where: among the first %d rows %s", len(rows), absent)
        return [prompt for row in rows if (prompt := self._stream.build(row)) is not None]

    def find(self, ids: Collection[str]) -> Mapping[str, Prompt]:
        """Return no prompts: finding them would mean reading the whole stream."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        place = self._place
        return {
            "epoch": place.epoch,
            "shard": place.shard,
            "window": place.window,
            "row": place.row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._place = Place(**state)

    def _next_row(self) -> Row | None:
        """Return the next row, or None at the end of a window, and move on."""
        place = self._place
        rows = self._window(replace(place, row=0))
        if place.row < len(rows):
            self._place = replace(place, row=place.row + 1)
            return rows[place.row]
        if len(rows) == self._stream.window:
            self._place = Place(place.epoch, place.shard, place.window + 1)
        elif place.shard + 1 < self._stream.num_shards:
            self._place = Place(place.epoch, place.shard + 1)
        else:
            self._place = Place(place.epoch + 1)
        return None

    def _window(self, start: Place) -> list[Row]:
        """Return the rows of a window in the order of training."""
        if start not in self._windows:
            if len(self._windows) > 1:  # keep the one before, to go back to
                del self._windows[min(self._windows)]
            size = self._stream.window
            shard = int(self._permutation(self._stream.num_shards, start.epoch)[start.shard])
            if self._reading is None or self._reading[0] != start:
                self._reading = start, self._stream.rows(shard, start.window * size)
            rows = list(islice(self._reading[1], size))
            following = replace(start, window=start.window + 1)
            self._reading = following, self._reading[1]
            order = self._permutation(len(rows), start.epoch, shard, start.window)
            self._windows[start] = [rows[index] for index in order]
        return self._windows[start]

    def _permutation(self, number: int, *place: int) -> list[int]:
        order: list[int] = np.random.default_rng((*self._seed, *place)).permutation(number).tolist()
        return order
