"""Run the warm-up of the quickstart, which gives GRPO something to reward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def warm_up(run_dir: Path) -> Path:
    """Return the final model of the run, which is written to this directory."""
    arguments = ["sft", "--config", "quickstart_sft", "--run_dir", str(run_dir)]
    subprocess.run([sys.executable, "-m", "lit_grpo", *arguments], check=True)
    return run_dir / "final"
