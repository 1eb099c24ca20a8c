"""The recipe of the rubric run, whose commands are forked instead of started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from subprocess import CompletedProcess
from types import SimpleNamespace

import _rubric_recipe
from forked_program import Child, become_lit_grpo


def run_forked(
    command: Sequence[str], *, stdout: int | None, text: bool, check: bool
) -> CompletedProcess[str]:
    """Run ``python -m lit_grpo WORD...`` as `subprocess.run` does."""
    reads, writes = os.pipe()
    child = Child(os.fork())
    if not child.pid:
        if stdout is not None:
            os.dup2(writes, sys.stdout.fileno())
        become_lit_grpo(command[3:])
    os.close(writes)
    with os.fdopen(reads) as reader:
        said = reader.read()
    return CompletedProcess(command, child.wait(600), said)


def main() -> None:
    _rubric_recipe.subprocess = SimpleNamespace(run=run_forked, PIPE=-1)  # type: ignore
    _rubric_recipe.main()
