"""Read the rows of a large parquet file from the disk when they are needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from lit_grpo.data.rows.files import decoded, json_columns
from lit_grpo.data.rows.filters import columns_of, failed_filter
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import UserError
from lit_grpo.types.atomic import locked, sync

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS_PER_BATCH = 1_000
"""Rows of a piece of the copy; one row is read without the others."""
CACHE = Path("~/.cache/lit-grpo/arrow")
"""Where copies are written of files whose own directory cannot be written to."""


class MappedRows(Sequence[Row]):
    """Rows of a parquet file with a column ``id``, each read when it is asked for.

    A parquet file can only be read in large pieces. Its rows are therefore copied once, in Arrow's
    format and without compression, and the copy is mapped into memory. It lies in ``.arrow`` beside
    the file, and is made again when the file changes. Several threads may read.

    Args:
        path: The parquet file.

    Raises:
        UserError: the disk is too full for the copy.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path = path
        copy = _copy_of(path)
        self._reader = pa.ipc.open_file(pa.memory_map(str(copy)))
        self._reading = threading.Lock()
        sizes = [self._batch(number).num_rows for number in range(self._reader.num_record_batches)]
        self._ends = np.cumsum(sizes)
        self._rows: NDArray[np.int32] = np.arange(sum(sizes), dtype=np.int32)
        self._json = json_columns(self._reader.schema)
        self._finish: tuple[Callable[[Row], Row], ...] = ()

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        number = int(self._rows[index])
        batch = int(np.searchsorted(self._ends, number, side="right"))
        start = self._ends[batch - 1] if batch else 0
        (columns,) = self._batch(batch).slice(number - start, 1).to_pylist()
        row = Row(
            source=str(self.path),
            number=number + 1,
            id=columns["id"],
            columns=decoded(columns, self._json),
        )
        for finish in self._finish:
            row = finish(row)
        return row

    def columns(self, *names: str) -> Iterator[Mapping[str, Any]]:
        """Read some columns of all rows; skip unknown names."""
        names = tuple(name for name in names if name in self._reader.schema.names)
        of_json = [name for name in self._json if name in names]
        starts = np.array([0, *self._ends])
        bounds = np.searchsorted(self._rows, starts.astype(self._rows.dtype))
        for number, (first, last) in enumerate(pairwise(bounds)):
            if first < last:
                of_batch = self._rows[first:last] - starts[number]
                batch = self._batch(number).select(names).take(of_batch)
                yield from (decoded(row, of_json) for row in batch.to_pylist())

    def where(self, filters: Mapping[str, Any]) -> MappedRows:
        """Return the rows that pass `failed_filter`."""
        if not filters:
            return self
        found = self.columns(*columns_of(filters))
        return self.select([failed_filter(one, filters) is None for one in found])

    def find(self, ids: Collection[str]) -> list[int]:
        """Return the indices of the rows with these ids."""
        wanted = set(ids)
        return [n for n, one in enumerate(self.columns("id")) if one["id"] in wanted]

    def select(self, is_kept: Sequence[bool] | NDArray[np.bool_]) -> MappedRows:
        """Return some of the rows, in the same order."""
        return self._with(_rows=self._rows[np.asarray(is_kept, dtype=bool)])

    def then(self, finish: Callable[[Row], Row]) -> MappedRows:
        """Return the same rows, each changed by a function when it is read."""
        return self._with(_finish=(*self._finish, finish))

    def _with(self, **changes: Any) -> MappedRows:
        other = object.__new__(MappedRows)
        other.__dict__ |= self.__dict__ | changes
        return other

    def _batch(self, number: int) -> pa.RecordBatch:
        with self._reading:
            return self._reader.get_batch(number)


def _copy_of(path: Path) -> Path:
    """Return the copy of a parquet file; one process makes it if it is missing."""
    state = path.stat()
    name = f"{path.stem}-{state.st_size}-{state.st_mtime_ns}.arrow"
    place = hashlib.sha256(str(path.parent.resolve()).encode()).hexdigest()[:16]
    for directory in (path.parent / ".arrow", CACHE.expanduser() / place):
        with suppress(OSError):  # it is not ours, or the file system cannot be written to
            directory.mkdir(parents=True, exist_ok=True)
        if (directory / name).exists() or os.access(directory, os.W_OK | os.X_OK):
            return _copied(path, directory / name)
    raise UserError(
        f"{path} must be copied to be read row by row, but neither {path.parent} nor "
        f"{CACHE.expanduser()} can be written to. Allow one of them, or copy the data."
    )


def _copied(path: Path, copy: Path) -> Path:
    with locked(copy.parent):
        if not copy.exists():
            for earlier in copy.parent.glob(f"{path.stem}-*.arrow*"):
                earlier.unlink()
            partial = copy.with_suffix(".arrow.partial")
            try:
                _convert(path, partial)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            sync(partial)
            partial.rename(copy)
    return copy


def _convert(path: Path, copy: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as source:
        groups = (source.metadata.row_group(n) for n in range(source.num_row_groups))
        needed, free = sum(one.total_byte_size for one in groups), shutil.disk_usage(copy.parent)
        if free.free < 1.1 * needed:
            raise UserError(
                f"{copy.parent} has {free.free / 1e9:.1f} GB left, but the uncompressed copy of "
                f"{path.name} needs {needed / 1e9:.1f} GB (rows are read from it). Free some space."
            )
        with pa.OSFile(str(copy), "wb") as file, pa.ipc.new_file(file, source.schema_arrow) as out:
            for batch in _batches(source, path):
                out.write_batch(batch)


def _batches(source: pq.ParquetFile, path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    try:
        yield from source.iter_batches(ROWS_PER_BATCH)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is damaged: {error}. Prepare the data again.") from error
