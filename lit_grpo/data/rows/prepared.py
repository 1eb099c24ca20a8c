"""A directory of prepared data: its splits, its manifest and what it holds out from training.

It has a parquet file for each split, ``manifest.json`` and ``holdout_ids.json``.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.data.rows.columns import joined_parts
from lit_grpo.data.rows.files import decoded, json_columns
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import Prompt, UserError
from lit_grpo.types.json_text import parse_json
from lit_grpo.types.settings import list_some

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
MANIFEST, HOLDOUT_IDS = "manifest.json", "holdout_ids.json"
HOLDOUT = "holdout"
"""The split that is never trained on."""
ROWS_PER_BATCH = 1_000
_IDS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDir:
    """A directory that `find_prepared` has found."""

    path: Path
    manifest: Mapping[str, Any]
    """Under ``splits``, the numbers of rows of each split, in all (``rows``) and ``by_source``; and
    where the rows come from."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits: train, validation, holdout, and those for a warm-up."""
        return tuple(self.manifest["splits"])

    def split(self, name: str) -> PreparedSplit:
        """Return a split by its name, which is its file's name without ``.parquet``.

        Raises:
            UserError: there is no such split, or its file is not the one that was written.
        """
        if name not in self.splits:
            raise UserError(
                f"{self.path} has no split {name!r}, only {', '.join(self.splits)}. Name one of "
                "them, or prepare the data again."
            )
        described = self.manifest["splits"][name]
        split = PreparedSplit(
            path=self.path / f"{name}.parquet",
            num_rows=described["rows"],
            sources=tuple(described["by_source"]),
        )
        split.check()
        return split

    def holdout(self) -> Holdout:
        """Return the ids and prompts of the rows that must not be trained on."""
        return Holdout.read(self.path / HOLDOUT_IDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSplit:
    """The rows of one split.

    They have the columns of their source, and ``id``, ``source``, ``kind`` and ``text_hash``;
    a column that only another source has is null.
    """

    path: Path
    num_rows: int
    sources: tuple[str, ...]
    """The names of the sources that its rows come from."""

    def check(self) -> None:
        """Raise UserError if the file is damaged or is not the one that was written."""
        import pyarrow.parquet as pq

        try:
            found = pq.read_metadata(self.path).num_rows
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path} cannot be read: {error}. Prepare it again.") from error
        if found != self.num_rows:
            raise UserError(
                f"{self.path} must have the {self.num_rows} rows of {MANIFEST}, got {found} (it is "
                "not the file that was written with it). Prepare the data again."
            )

    def rows(self) -> Sequence[Row]:
        """Return the rows, with their ids from the column ``id``."""
        return [*self.stream()]

    def stream(self) -> Iterator[Row]:
        """Yield the rows one by one, for callers that need not have all of them in memory."""
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            of_json = json_columns(file.schema_arrow)
            batches = file.iter_batches(ROWS_PER_BATCH)
            found = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(found, start=1):
                columns = decoded(row, of_json)
                yield Row(source=str(self.path), number=number, id=row["id"], columns=columns)

    def ids(self) -> pa.ChunkedArray:
        """Return the ids of the rows without reading their other columns."""
        return self._column("id")

    def text_hashes(self) -> pa.ChunkedArray:
        """Return the `text_hash` of the prompt of each row."""
        return self._column("text_hash")

    def _column(self, name: str) -> pa.ChunkedArray:
        import pyarrow.parquet as pq

        return pq.read_table(self.path, columns=[name])[name]


def find_prepared(source: str) -> PreparedDir | None:
    """Return the prepared directory that a source names, or names a split of; None if neither.

    Raises:
        UserError: the directory is damaged, or was written by a version that this one cannot read.
    """
    path = Path(source).expanduser()
    directory = path if path.is_dir() else path.parent
    if not (directory / HOLDOUT_IDS).is_file():
        return None
    found = PreparedDir(path=directory, manifest=_read_json(directory / MANIFEST, "splits"))
    is_part = path.suffix == ".parquet" and path.stem in found.splits
    return found if path == directory or is_part else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Rows that must not be trained on, by their ids and, from whatever file, by their texts."""

    ids: frozenset[str]
    text_hashes: frozenset[str]
    files: tuple[str, ...]
    """Where it was read from."""

    @classmethod
    def read(cls, path: Path) -> Holdout:
        """Read a ``holdout_ids.json``.

        Raises:
            UserError: the file is damaged or not there.
        """
        sources = read_held_out(path).values()
        hash_by_id = {key: one for rows in sources for key, one in rows.items()}
        return cls(
            ids=frozenset(hash_by_id),
            text_hashes=frozenset(hash_by_id.values()),
            files=(str(path),),
        )

    @classmethod
    def of(cls, source: str) -> Holdout:
        """Read a ``holdout_ids.json``, or the one in a directory of prepared data.

        Raises:
            UserError: it is neither, or is damaged.
        """
        path = Path(source).expanduser()
        path = path / HOLDOUT_IDS if path.is_dir() else path
        if not path.is_file():
            raise UserError(
                f"data.holdout must name files {HOLDOUT_IDS} or directories of prepared data, got "
                f"{source} (there is no {path}). Set data.holdout."
            )
        return cls.read(path)

    def __or__(self, other: Holdout) -> Holdout:
        """Return the rows that either of the two holds out."""
        return Holdout(
            ids=self.ids | other.ids,
            text_hashes=self.text_hashes | other.text_hashes,
            files=tuple(dict.fromkeys((*self.files, *other.files))),
        )

    def has(self, key: str, *texts: str) -> bool:
        """Return whether a row is held out, given its id and the `text_hash` of each of its texts.

        A prompt that is held out may be one text of many: a question that a template wraps.
        """
        return key in self.ids or not self.text_hashes.isdisjoint(texts)

    def refuse(self, rows: Iterable[tuple[str, ...]], source: str) -> None:
        """Check that none of these rows is held out.

        Args:
            rows: The id of each row and the `text_hash` of each of its texts.
            source: What the rows are, for the message.

        Raises:
            UserError: one is.
        """
        found = [key for key, *texts in rows if self.has(key, *texts)]
        if found:
            raise UserError(
                f"{source} must not have rows that are held out, got {len(found)}: "
                f"{list_some(found, _IDS_SHOWN)} (an evaluation on them would be too good). "
                f"Remove the rows, which {' and '.join(self.files)} lists, or train on the split "
                "train."
            )


def read_held_out(path: Path) -> Mapping[str, Mapping[str, str]]:
    """Return by source the ids that a ``holdout_ids.json`` lists, with the hash of each prompt.

    Raises:
        UserError: the file is damaged or not there.
    """
    sources: Mapping[str, Mapping[str, str]] = _read_json(path, "sources")["sources"]
    return sources


def text_hash(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return 32 hexadecimal digits that are the same for prompts with the same words.

    A conversation is the text of its messages, except the system message.
    """
    if not isinstance(prompt, str):
        turns = (one for one in prompt if one.get("role") != "system")
        said = (joined_parts(one.get("content")) for one in turns)
        prompt = "\n".join(text for text in said if isinstance(text, str))
    return hashlib.sha256(normalised_text(prompt).encode()).hexdigest()[:32]


def holdout_keys(key: str, columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a row may be held out by: its id, and the `text_hash` of each of its texts.

    Of a prepared row these are the prompt and the question that a template may have wrapped.
    """
    known = columns.get("text_hash")
    if not isinstance(known, str):
        return key, *text_hashes(columns)
    return key, known, *text_hashes(columns.get("question"))


def text_hashes(value: Any) -> Iterator[str]:
    """Yield the `text_hash` of each text among the columns of a row, or in another value.

    Those are texts, conversations and what their users say, also in nested columns.
    """
    if isinstance(value, str):
        yield text_hash(value)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from text_hashes(one)
    elif isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        yield text_hash(value)
        said = (joined_parts(one.get("content")) for one in value if one.get("role") == "user")
        yield from (text_hash(text) for text in said if isinstance(text, str))


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """Return 32 hexadecimal digits that are the same for the same prompts with their gold answers.

    Neither their order nor their chat template matters.
    """
    known = sorted(f"{text_hash(one.messages or one.text)} {one.answer}" for one in prompts)
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:32]


def normalised_text(text: str) -> str:
    """Return a text without differences of capitals, spaces and ways to encode a character.

    Superscripts and other characters with a meaning of their own stay: x² is not x2.
    """
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())


def _read_json(path: Path, key: str) -> dict[str, Any]:
    """Return the object of a file that has this key and the right format."""
    fix = "Prepare the data again."
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. {fix}") from error
    if not isinstance(value, dict) or not isinstance(value.get(key), dict):
        raise UserError(f"{path} must be a JSON object with {key!r}, got something else. {fix}")
    if value.get("format") != FORMAT:
        raise UserError(
            f"{path} must have the format {FORMAT}, got {value.get('format')} (another version of "
            f"lit-grpo has written it). {fix}"
        )
    return value
