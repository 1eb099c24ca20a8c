"""A directory for tests that run commands in their own process, and the clean-up afterwards."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lit_grpo.cli.run_dir import RUN_DIR_VARIABLE
from lit_grpo.runs.files.log import LOGGED


@contextmanager
def workplace(directory: Path) -> Iterator[pytest.MonkeyPatch]:
    """Work in a directory; what a command changes in the process is undone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "path", sys.path.copy())
        patch.setenv(RUN_DIR_VARIABLE, "")
        try:
            yield patch
        finally:
            close_logs()


def close_logs() -> None:
    """Close the log files, which a command leaves open until its process ends."""
    for logger in map(logging.getLogger, LOGGED):
        for handler in logger.handlers.copy():
            if isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)
                handler.close()
    logging.captureWarnings(False)
