"""A virtual environment with a few packages and what they require, as closed clusters have.

This project is not installed in it: a program finds a checkout through its own path.
"""

from __future__ import annotations

import os
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

PACKAGES = (
    *("torch", "transformers", "peft", "lightning", "numpy"),
    *("rich", "pandas", "pytest", "hypothesis"),
)
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def make_environment(directory: Path) -> str:
    """Make such an environment of links to installed packages; return its Python."""
    venv.create(directory, symlinks=True)
    site_packages = directory / "lib" / PYTHON / "site-packages"
    for found in required(*PACKAGES):
        for entry in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = site_packages / entry
            if not link.exists():
                os.symlink(found.locate_file(entry), link)
    return str(directory / "bin" / "python")


def required(*names: str) -> list[Distribution]:
    """Return the installed ones of these packages and of all that they require."""
    found: dict[tuple[str, frozenset[str]], Distribution] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        one = waiting.pop()
        key = one.name.lower().replace("_", "-"), frozenset(one.extras)
        if key in found:
            continue
        try:
            found[key] = distribution(one.name)
        except PackageNotFoundError:
            continue
        for line in found[key].requires or ():
            further = Requirement(line)
            extras = one.extras or {""}
            if further.marker is None or any(
                further.marker.evaluate({"extra": extra}) for extra in extras
            ):
                waiting.append(further)
    return list(found.values())
