"""What the tests of ``lit-grpo doctor`` share."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cli_base import BASE


@pytest.fixture(autouse=True)
def here(here) -> Path:
    """The working directory, with a config that can start."""
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    return here
