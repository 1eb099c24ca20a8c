"""The environment of the scripts is made once, and says what it does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from paths import ROOT

PREPARE = f'. {ROOT}/scripts/_environment.sh; prepare_environment ""'


def prepare(directory: Path) -> str:
    """Prepare an environment whose Python installs nothing; return what is printed."""
    python = directory / "venv" / "bin" / "python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\n")
        python.chmod(0o755)
    (directory / "pyproject.toml").touch()
    environment = os.environ | {"LIT_GRPO_VENV": str(directory / "venv")}
    command = ["bash", "-euc", PREPARE]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_only_what_is_not_installed_is_said_to_be_installed(tmp_path):
    assert "Installing lit-grpo into" in prepare(tmp_path)
    assert prepare(tmp_path) == ""
    program = tmp_path / "venv" / "bin" / "lit-grpo"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "pyproject.toml").write_text("[project]\n")  # or installed in another way
    assert "Checking the installation of lit-grpo in" in prepare(tmp_path)


def test_the_recipe_installs_what_its_judge_needs():
    assert 'prepare_environment "[judge]"' in (ROOT / "scripts" / "rubric_recipe").read_text()
