"""Checkpoints without contents."""

from pathlib import Path

import torch


def write_empty(*paths: Path) -> None:
    """Write a checkpoint without contents to each path."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({}, path)
