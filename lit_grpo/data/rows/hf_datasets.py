"""Open a Hugging Face dataset: a directory or an id on the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_grpo.data.rows.files import READERS
from lit_grpo.types import UserError
from lit_grpo.types.spelling import did_you_mean

# org/name, org/name:split, org/name:subset:split; a split may be a slice, train[:100]
_DATASET = re.compile(
    r"(?P<path>[^:]+)(?::(?P<subset>[^:\[\]]+)(?=:))?(?::(?P<split>[^:\[\]]+(?:\[[^\]]*\])?))?"
)
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_MISTYPED = 0.85
"""Similarity with a file's name from which a name is taken for a typo, not a dataset's id."""


def open_dataset(source: str, *, streaming: bool = False) -> tuple[str, Any]:
    """Return the short name of a dataset and the dataset, an ``IterableDataset`` if it is streamed.

    Raises:
        UserError: there is none.
    """
    match = _DATASET.fullmatch(source)
    path = Path(match["path"]).expanduser() if match else Path(source)
    if match is None or not (path.is_dir() or _HUB_ID.fullmatch(match["path"])):
        raise UserError(
            f"{source}: no such file or directory (looked for {path.absolute()}), and it is not a "
            f"dataset id. Write a path, or id, id:split or id:subset:split. "
            "Rows themselves are dicts, as {'prompt': …}."
        )
    if path.suffix and path.parent.is_dir() and not path.is_dir():
        files = [one.name for one in path.parent.iterdir() if one.suffix in READERS]
        if hint := did_you_mean(path.name, files, similarity=_MISTYPED):
            raise UserError(f"{source}: no such file (looked for {path.absolute()}).{hint}")
    if path.is_dir():  # datasets names them after their last part, which . does not have
        path = Path(os.path.abspath(path))
    dataset = _load_dataset(source, path, match["subset"], match["split"], streaming=streaming)
    return f"{path.name}-{dataset.split}" if dataset.split else path.name, dataset


def _load_dataset(
    source: str, path: Path, subset: str | None, split: str | None, *, streaming: bool
) -> Any:
    import datasets  # takes a second to import, and most runs read files

    is_saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    if not is_saved and subset is None:
        _refuse_several_formats(source, path)
    try:
        if is_saved:
            dataset = datasets.load_from_disk(str(path))
        else:
            dataset = datasets.load_dataset(str(path), subset, split=split, streaming=streaming)
    except Exception as error:  # the Hub, the network and the file formats raise many kinds
        while error.__cause__ is not None:  # the wrapped exception does not name the file
            error = error.__cause__  # type: ignore[assignment]
        raise UserError(
            f"{source}: no dataset could be loaded ({type(error).__name__}: {error}). Write an "
            "existing file or directory, or a Hub dataset as id, id:split or id:subset:split; "
            'prompts themselves, in Python, as [{"prompt": …}].'
        ) from error
    if isinstance(dataset, Mapping):
        chosen = _choose_split(source, dataset, split)
        if split is None and path.is_dir() and not is_saved:
            _refuse_left_out(source, path, next(iter(dataset)))
        return chosen
    if is_saved and split:
        raise UserError(
            f"{source} names the split {split!r}, but {path} holds one dataset without splits. "
            f"Write {path}."
        )
    return dataset.to_iterable_dataset() if is_saved and streaming else dataset


def _refuse_several_formats(source: str, directory: Path) -> None:
    formats = {file.suffix for file in _visible_files(directory)} & set(READERS)
    if len(formats) > 1:
        raise UserError(
            f"{source} has files of several formats ({', '.join(sorted(formats))}), of which only "
            "one would be read. Name the files, in a list if there are several."
        )


def _refuse_left_out(source: str, directory: Path, split: str) -> None:
    """Refuse a directory if ``datasets`` reads only its files with a split in the name."""
    import datasets
    from datasets.data_files import FILES_TO_IGNORE

    splits = datasets.load_dataset_builder(str(directory)).config.data_files
    read = {Path(file).resolve() for files in splits.values() for file in files}
    suffixes = {file.suffix for file in read}
    left_out = [
        file
        for file in _visible_files(directory)
        if file.suffix in suffixes and file.name not in FILES_TO_IGNORE
        if file.resolve() not in read
    ]
    if left_out:
        raise UserError(
            f"{source} has only the split {split} by the names of its files, which leaves out "
            f"{min(left_out).relative_to(directory)}. Write {source}:{split}, or name the files, "
            "in a list if there are several."
        )


def _visible_files(directory: Path) -> list[Path]:
    """Return the files of a directory without hidden ones, which ``datasets`` does not read."""
    return [
        file
        for file in directory.rglob("*")
        if file.is_file()
        and not any(part.startswith((".", "__")) for part in file.relative_to(directory).parts)
    ]


def _choose_split(source: str, splits: Mapping[str, Any], split: str | None) -> Any:
    names = list(splits)
    if split is None and len(names) > 1:
        raise UserError(
            f"{source} must name one of its splits {', '.join(names)} (it has several). "
            f"Write {source}:{names[0]}."
        )
    if split is not None and split not in splits:
        raise UserError(
            f"{source}: there is no split {split!r}, only {', '.join(names)}. "
            f"Write {source.removesuffix(split)}{names[0]}."
        )
    return splits[split or names[0]]
