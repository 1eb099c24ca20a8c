from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def of_files(printed_config) -> Callable[..., dict[str, Any]]:
    """The config that several files amount to."""

    def read(*texts: str, arguments=()) -> dict:
        names = [f"{number}.yaml" for number in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            Path(name).write_text(text)
        return printed_config(*(f"--config={name}" for name in names), *arguments)

    return read
