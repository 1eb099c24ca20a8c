"""Tell a lack of memory from other errors, and say what to change."""

from __future__ import annotations

import re

import torch

from lit_grpo.diagnostics.causes.machine import MEMORY_ADVICE

MB = 1e6


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch or Python is a lack of memory, of a GPU or of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def describe_out_of_memory(stage: str, error: BaseException) -> str:
    """Return a line on a lack of memory in a stage, or in none if empty, and what to change."""
    stage = stage if stage in MEMORY_ADVICE else ""
    asked = re.search(r"allocate (\d+) bytes", str(error))
    size = f" {int(asked[1]) / MB:,.1f} MB were asked for." if asked else ""
    on_gpu = isinstance(error, torch.OutOfMemoryError)
    detail = f" {str(error).split('. If reserved')[0].strip()}" if on_gpu else size
    place = f"in the stage {stage}" if stage else "outside of the stages of a step"
    return f"out of memory {place}.{detail} {MEMORY_ADVICE[stage].replace('`', '')}"
