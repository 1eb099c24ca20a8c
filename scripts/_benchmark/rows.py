"""Measure how soon a run can train on very many prepared rows, and how much memory they take."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from _benchmark.results import Result

SCRIPTS = Path(__file__).parents[1]
TOKENS = 281
"""Tokens of a prompt."""
SECONDS, MEGABYTES = 10.0, 500.0
"""Within this time the first batch must be there, and no more memory may be taken."""
ROWS_AT_ONCE = 50_000
BATCHES, BATCH_SIZE = 100, 64


def compare_rows(num_rows: int) -> Iterator[Result]:
    """Compare the time to the first batch, and the memory of a hundred, with their limits."""
    with TemporaryDirectory() as directory:
        prepared = Path(directory, "prepared")
        write_rows(prepared, num_rows)
        for case in ("for the first time", "again"):
            yield from _results(f"{num_rows:,} rows opened {case}", measure(prepared))


def _results(case: str, measured: dict[str, float]) -> Iterator[Result]:
    limits = {
        "time to the first batch": ("seconds", SECONDS, "s"),
        "memory of 100 batches": ("megabytes", MEGABYTES, "MB"),
    }
    for what, (name, limit, unit) in limits.items():
        yield Result(
            figure="rows",
            case=f"{what}, {case}",
            against="the limits",
            ours=measured[name],
            other=limit,
            unit=unit,
            target=1.0,
            details={"": {"batch (ms)": measured["milliseconds"]}} if unit == "s" else {},
        )


def write_rows(directory: Path, num_rows: int) -> None:
    """Write prepared data with prompts of `TOKENS` characters, each a token."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    directory.mkdir()
    names = ("id", "source", "kind", "text_hash", "prompt", "answer")
    schema = pa.schema([(name, pa.string()) for name in names])
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", dtype=np.uint8)
    random = np.random.default_rng(0)
    with pq.ParquetWriter(directory / "train.parquet", schema, compression="zstd") as writer:
        for start in range(0, num_rows, ROWS_AT_ONCE):
            size = min(ROWS_AT_ONCE, num_rows - start)
            drawn = random.choice(letters, (size, TOKENS))
            prompts = [row.tobytes().decode() for row in drawn]
            ids = [f"sums:{start + number:08}" for number in range(size)]
            table = {
                "id": ids,
                "source": ["sums"] * size,
                "kind": ["verifiable"] * size,
                "text_hash": [f"{start + number:032x}" for number in range(size)],
                "prompt": prompts,
                "answer": ["1"] * size,
            }
            writer.write_table(pa.table(table, schema=schema), row_group_size=10_000)
        pq.write_table(schema.empty_table(), directory / "validation.parquet")
    sizes = {"train": num_rows, "validation": 0}
    splits = {name: {"rows": size, "by_source": {"sums": size}} for name, size in sizes.items()}
    manifest = {"format": 1, "seed": 0, "splits": splits}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    held_out = {"format": 1, "seed": 0, "sources": {"sums": {}}}
    (directory / "holdout_ids.json").write_text(json.dumps(held_out))


def measure(prepared: Path) -> dict[str, float]:
    """Open the data in a process of its own, as a rank does."""
    words = [sys.executable, "-m", "_benchmark.rows", str(prepared)]
    done = subprocess.run(words, cwd=SCRIPTS, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def open_and_train(prepared: str) -> dict[str, float]:
    """Return the seconds to the first batch, those of a batch, and the memory that is taken."""
    from lit_grpo.data import PromptData
    from lit_grpo.policy.byte_tokenizer import byte_tokenizer

    data = PromptData(prepared, prompts_per_step=BATCH_SIZE, max_prompt_tokens=2 * TOKENS)
    trainer: Any = SimpleNamespace(
        is_global_zero=True,
        global_rank=0,
        world_size=1,
        overfit_batches=0,
        limit_train_batches=1.0,
        lightning_module=SimpleNamespace(tokenizer=byte_tokenizer()),
    )
    data.trainer = trainer
    before, begin = own_memory(), time.perf_counter()
    data.setup("fit")
    batches = iter(data.train_dataloader())
    next(batches)
    first = time.perf_counter()
    for _ in islice(batches, BATCHES):
        pass
    end = time.perf_counter()
    return {
        "seconds": first - begin,
        "milliseconds": 1000 * (end - first) / BATCHES,
        "megabytes": own_memory() - before,
    }


def own_memory() -> float:
    """Return the megabytes of this process that no file on the disk backs."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    (kilobytes,) = (line.split()[1] for line in rollup.splitlines() if line.startswith("Anonymous"))
    return int(kilobytes) / 1024


if __name__ == "__main__":
    print(json.dumps(open_and_train(sys.argv[1])))
