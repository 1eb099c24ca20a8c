"""Write a directory of prepared data: its splits, the manifest, the holdout, and a config."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from lit_grpo import __version__
from lit_grpo.cli.prepare.recipe import Gold, Recipe
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.data.rows.prepared import FORMAT, HOLDOUT_IDS, MANIFEST, PreparedDir
from lit_grpo.data.rows.schema import find_schema, write_parquet
from lit_grpo.types import UserError
from lit_grpo.types.atomic import replacing
from lit_grpo.types.errors import is_disk_full

DATA_CONFIG = "data.yaml"
ROW_TYPES: Mapping[str, pa.DataType] = {
    "id": pa.string(),
    "source": pa.string(),
    "kind": pa.string(),
    "text_hash": pa.string(),
}
COLUMN_TYPES: Mapping[str, pa.DataType] = {
    "prompt": pa.string(),
    "question": pa.string(),
    "answer": pa.string(),
    "answers": pa.list_(pa.string()),
    "gold_scores": pa.list_(pa.float64()),
    "gold_spread": pa.list_(pa.float64()),
    "completion": pa.string(),
}
"""The types of those columns that may be there, in their order."""

HeldOut = Mapping[str, Mapping[str, str]]
"""Source -> id that is held out -> hash of its prompt."""


def write_prepared(
    out: Path,
    splits: Mapping[str, Sequence[PreparedRow]],
    held_out: HeldOut,
    about: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Write all files of a directory, replacing what was prepared there; return the manifest.

    Args:
        out: The directory.
        splits: Its rows.
        held_out: What must not be trained on, whether or not its rows exist.
        about: What the manifest says in addition to the splits.
        config: What ``data.yaml`` has.

    Raises:
        UserError: the directory holds something else, a column has values of different types, or
            the disk is full.
    """
    if out.exists() and not (out / HOLDOUT_IDS).is_file() and (out.is_file() or any(out.iterdir())):
        got = "a file (it" if out.is_file() else "one with other files (they"
        raise UserError(
            f"{out} must be a new directory or one of prepared data, got {got} would be lost). "
            "Choose another --out."
        )
    schema = _schema(splits)
    with _replacing(out) as partial:
        described = {}
        for name, rows in splits.items():
            path = partial / f"{name}.parquet"
            write_parquet(path, ((row.origin, row.as_dict()) for row in rows), schema)
            by_source = Counter(row.source for row in rows)
            described[name] = {
                "rows": len(rows),
                "by_source": dict(sorted(by_source.items())),
                **_file_facts(path),
            }
        ids = {"format": FORMAT, "seed": about["seed"], "sources": held_out}
        _write_json(ids, partial / HOLDOUT_IDS)
        manifest = {
            "format": FORMAT,
            **about,
            "splits": described,
            "columns": {field.name: str(field.type) for field in schema},
            "versions": _versions(),
        }
        _write_json(manifest, partial / MANIFEST)
        text = yaml.safe_dump(dict(config), sort_keys=False)
        (partial / DATA_CONFIG).write_text(text, encoding="utf-8")
    return manifest


def add_columns(
    prepared: PreparedDir, split: str, columns: Mapping[str, pa.Array], about: Mapping[str, Any]
) -> None:
    """Write columns into a split, replacing columns of the same names.

    Args:
        prepared: The directory, which has them when all is written, and is as before if not.
        split: The split.
        columns: Name -> a value for each row, in their order.
        about: What the manifest says of each of these columns of this split.

    Raises:
        UserError: the disk is full.
    """
    with _replacing(prepared.path) as partial:
        ignored = shutil.ignore_patterns(".arrow", f"{split}.parquet", MANIFEST)
        shutil.copytree(prepared.path, partial, ignore=ignored, dirs_exist_ok=True)
        path = partial / f"{split}.parquet"
        _copy_with_columns(prepared.path / path.name, path, columns)
        manifest = dict(prepared.manifest)
        described = manifest["splits"][split] | _file_facts(path)
        manifest["splits"] = manifest["splits"] | {split: described}
        types = {name: str(values.type) for name, values in columns.items()}
        manifest["columns"] = manifest.get("columns", {}) | types
        for name in columns:
            manifest[name] = manifest.get(name, {}) | {split: dict(about)}
        _write_json(manifest, partial / MANIFEST)


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """Replace a directory; raise UserError if the disk is full."""
    try:
        with replacing(directory) as partial:
            yield partial
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise UserError(
            f"{directory} cannot be written: the disk is full, and what was there has not changed. "
            "Free some space, or choose another place."
        ) from error


def _copy_with_columns(source: Path, target: Path, columns: Mapping[str, pa.Array]) -> None:
    with pq.ParquetFile(source) as file:
        others = [field for field in file.schema_arrow if field.name not in columns]
        added = [(name, values.type) for name, values in columns.items()]
        schema = pa.schema([*others, *added], file.schema_arrow.metadata)
        names = [field.name for field in others]
        with pq.ParquetWriter(target, schema, compression="zstd", version="2.6") as writer:
            start = 0
            for number in range(file.num_row_groups):
                table = file.read_row_group(number, columns=names)
                num_rows = table.num_rows
                for name, values in columns.items():
                    table = table.append_column(name, values.slice(start, num_rows))
                writer.write_table(table.cast(schema))
                start += num_rows


def training_config(out: Path, recipe: Recipe, splits: Mapping[str, Sequence[PreparedRow]]) -> Any:
    """Return the keys of a run on prepared data: its sources with their weights and phases."""
    has_answers = {row.source for row in splits["train"] if row.columns.get("answer") is not None}
    sources: dict[str, Any] = {}
    for name, source in recipe.sources.items():
        settings: dict[str, Any] = {"train": str(out), "where": {"source": name}}
        if source.kind == "verifiable" and name not in has_answers:
            settings["require_answer"] = False
        data_class = "RubricData" if source.kind == "open" else "PromptData"
        data = {"class_path": data_class, "init_args": settings}
        sources[name] = {"weight": source.weight, "data": data}
    phases = {"curriculum": recipe.curriculum} if recipe.curriculum else {}
    return {"data": {"class_path": "MixtureData", "init_args": {"sources": sources, **phases}}}


def warmup_config(out: Path) -> Any:
    """Return the keys of ``lit-grpo sft`` on prepared pairs of prompt and completion."""
    settings = {"train": str(out), "require_answer": False}
    return {
        "model": {"target_column": "completion"},
        "data": {"class_path": "PromptData", "init_args": settings},
    }


def hash_of_recipe(recipe: Recipe) -> str:
    """Return a hash of the settings that determine the rows, without scoring and paths."""
    parts = asdict(replace(recipe, judge=None, description="", gold=Gold()))
    for source in parts["sources"].values():
        del source["data"]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _schema(splits: Mapping[str, Sequence[PreparedRow]]) -> pa.Schema:
    """Return one schema for all splits, with the known columns that any row has."""
    rows = [row for some in splits.values() for row in some]
    there = {name for row in rows for name, value in row.columns.items() if value is not None}
    known = {name: kind for name, kind in COLUMN_TYPES.items() if name in there}
    for row in rows:
        for name in ("prompt", "question", "answer", "completion"):
            value = row.columns.get(name)
            if value is not None and not isinstance(value, str):
                raise UserError(
                    f"{row.origin}: the column of the role {name} must hold text, got "
                    f"{str(value)[:60]!r}. Set another one under columns of the recipe."
                )
    return find_schema(((row.origin, row.columns) for row in rows), {**ROW_TYPES, **known})


def _file_facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"sha256": digest, "bytes": path.stat().st_size}


def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("pyarrow", "datasets", "datasketch")}
    return {"lit-grpo": __version__, "python": platform.python_version(), **packages}


def _write_json(value: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, sort_keys=True, indent=1) + "\n", encoding="utf-8")
