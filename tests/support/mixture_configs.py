"""A config of two sources of data, to put mistakes into."""

from __future__ import annotations

import copy
from typing import Any

from tiny import LLAMA

DATA: dict[str, Any] = {"class_path": "PromptData", "init_args": {"train": "rows.jsonl"}}
SOURCE = {"data": DATA}


def config(**wrong: Any) -> dict[str, Any]:
    """Return a config of two sources, of which the second is changed."""
    sources = {"first": SOURCE, "second": SOURCE | wrong}
    return {
        "model": {"policy": {"architecture": LLAMA}, "rewards": ["MathReward"]},
        "data": {"class_path": "MixtureData", "init_args": {"sources": copy.deepcopy(sources)}},
    }
