"""A small directory of prepared data, written by hand as the format says."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lit_grpo.data.rows.prepared import text_hash

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "source": pa.string(),
        "kind": pa.string(),
        "text_hash": pa.string(),
        "prompt": pa.string(),
        "question": pa.string(),
        "answer": pa.string(),
        "answers": pa.list_(pa.string()),
        "gold_scores": pa.list_(pa.float64()),
        "gold_spread": pa.list_(pa.float64()),
        "rubric": pa.json_(),
        "completion": pa.string(),
    }
)
SPLITS = ("train", "validation", "holdout")


def verifiable_row(number: int) -> dict[str, Any]:
    text = f"What is {number} plus {number + 1}?"
    gold = str(2 * number + 1)
    return {
        "id": f"verifiable:{number}",
        "source": "verifiable",
        "kind": "verifiable",
        "text_hash": text_hash(text),
        "prompt": text,
        "answer": gold,
        "completion": f"{number} + {number + 1} = {gold}",
    }


def open_row(number: int) -> dict[str, Any]:
    """A row without a completion, whose answers differ in quality."""
    text = f"Describe hill number {number}."
    return {
        "id": f"open:{number}",
        "source": "open",
        "kind": "open",
        "text_hash": text_hash(text),
        "prompt": text,
        "question": text,
        "answers": [f"Hill {number} is green and steep.", "A hill.", ""],
        "gold_scores": [0.9, 0.4, 0.0],
        "gold_spread": [0.1, 0.2, 0.0],
        "rubric": [{"criterion": "names a colour", "weight": number}, {"criterion": "is short"}],
    }


def write_prepared(
    directory: Path, *, num_train: int = 8, num_validation: int = 2, num_holdout: int = 2
) -> Path:
    """Write splits with these numbers of rows of each of the two sources; return the directory."""
    directory.mkdir(parents=True)
    numbers = iter(range(10**6))
    sizes = dict(zip(SPLITS, (num_train, num_validation, num_holdout), strict=True))
    splits: dict[str, list[dict[str, Any]]] = {
        name: [
            make(number)
            for number in [next(numbers) for _ in range(size)]
            for make in (verifiable_row, open_row)
        ]
        for name, size in sizes.items()
    }
    described = {}
    for name, rows in splits.items():
        path = directory / f"{name}.parquet"
        write_rows(rows, path)
        described[name] = {
            "rows": len(rows),
            "by_source": dict(Counter(row["source"] for row in rows)),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
        }
    held_out: dict[str, dict[str, str]] = {"open": {}, "verifiable": {}}
    for row in splits["holdout"]:
        held_out[row["source"]][row["id"]] = row["text_hash"]
    write_json({"format": 1, "seed": 0, "sources": held_out}, directory / "holdout_ids.json")
    write_json({"format": 1, "seed": 0, "splits": described}, directory / "manifest.json")
    return directory


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write one split; what is JSON by its type is text in the file."""
    texts = [
        row | {"rubric": json.dumps(row["rubric"]) if "rubric" in row else None} for row in rows
    ]
    storage = pa.schema(
        [field.with_type(pa.string()) if field.name == "rubric" else field for field in SCHEMA]
    )
    table = pa.Table.from_pylist(texts, schema=storage).cast(SCHEMA)
    pq.write_table(table, path, row_group_size=10_000, compression="zstd")


def write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, sort_keys=True, indent=1))
