"""Skip tests that need what a machine lacks; where it is required, run them, so that they fail."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

REQUIRED = "LIT_GRPO_TESTS_NEED"
"""Variable with the names of what has to be there, with commas in between."""


def needs(name: str, is_there: bool, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if something is neither there nor required."""
    is_required = name in os.environ.get(REQUIRED, "").split(",")
    return pytest.mark.skipif(not (is_there or is_required), reason=reason)


needs_torchao, needs_bitsandbytes = (
    needs(name, find_spec(name) is not None, f"needs pip install {name}")
    for name in ("torchao", "bitsandbytes")
)
needs_deepspeed = needs(
    "deepspeed",
    find_spec("deepspeed") is not None,
    "needs pip install 'lit-grpo[deepspeed]'",
)
