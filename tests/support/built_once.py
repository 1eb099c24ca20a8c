"""What is built once for all workers of a test run, such as a model that several files train."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def built_once(name: str, build: Callable[[Path], None], tmp_path_factory) -> Path:
    """Return the directory that the first worker to ask has built; the others wait for it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers
    directory = root / name
    with FileLock(root / f"{name}.lock"):
        if not directory.exists():
            unfinished = tmp_path_factory.mktemp(name)
            build(unfinished)
            unfinished.rename(directory)
    return directory
