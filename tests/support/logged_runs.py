"""Run directories as a training run leaves them, without a training run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

HOLD = """
import sys, time
from pathlib import Path
from lit_grpo.runs.files.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
"""A program that looks like a training run in the directory that it is given."""


def write_run(
    path: Path,
    metrics: Mapping[str, Sequence[Any]],
    *,
    events: Sequence[Mapping[str, Any]] = (),
    completions: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    config: Mapping[str, Any] | None = None,
    first_step: int = 0,
) -> Path:
    """Write a run with a row of metrics for each step, and its other files as far as given."""
    path.mkdir(parents=True)
    steps = range(first_step, first_step + len(next(iter(metrics.values()))))
    clock = {"step": steps, "seconds": [1.5 * (step + 1) for step in steps]}
    pd.DataFrame(clock | dict(metrics)).to_csv(path / "metrics.csv", index=False)
    if events:
        lines = [json.dumps({"time": "2026-11-23T16:05:01+00:00"} | dict(one)) for one in events]
        (path / "events.jsonl").write_text("\n".join(lines) + "\n")
    for step, rows in (completions or {}).items():
        (path / "completions").mkdir(exist_ok=True)
        table = pd.DataFrame([row(**one) for one in rows])
        table.to_parquet(path / "completions" / f"step_{step:06d}.parquet")
    if config is not None:
        (path / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    return path


def row(**changes: Any) -> dict[str, Any]:
    """Return a row of the completions of a step."""
    return {
        "prompt_id": "p0",
        "prompt": "1+1=",
        "completion": "2",
        "finish_reason": "stop",
        "num_tokens": 2,
        "answer": "2",
        "reward": 1.0,
        "valid": True,
        "advantage": 0.5,
        "score/math": 1.0,
        "outcome/math": "ok",
        "detail/math": "",
    } | changes
