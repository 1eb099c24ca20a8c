"""Export a checkpoint of a run with the policy of the run's config."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_grpo.cli.parsing.config_files import read_config
from lit_grpo.cli.parsing.parser import Parser
from lit_grpo.policy import Policy
from lit_grpo.runs.export import load_alone, refuse_files, write_model
from lit_grpo.runs.files.writable import check_writable
from lit_grpo.runs.run_log import silence_chatter
from lit_grpo.types import UserError


def export(checkpoint: Path, run_dir: Path, directory: Path) -> None:
    """Write the policy of a checkpoint as ``final/`` is written, completely or not at all.

    Args:
        checkpoint: A checkpoint of the run.
        run_dir: Directory of the run.
        directory: Where to write, which `check_directory` has checked.

    Raises:
        UserError: the policy cannot be made from the run's config.
    """
    silence_chatter()
    sys.path.insert(0, os.getcwd())  # for a policy class of the user's
    write_model(checkpoint, directory, _read_policy(run_dir, checkpoint))


def check_directory(directory: Path) -> None:
    """Raise UserError if the directory is a file, has files, or cannot be made."""
    refuse_files(directory, "--export")
    is_there = directory.exists()  # and will be replaced
    check_writable("--export", directory, directory.absolute().parent if is_there else directory)


def _read_policy(run_dir: Path, checkpoint: Path) -> Policy:
    """Return the policy of a run with its initial weights."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise UserError(
            f"--export makes the policy from {path}, and there is none (runs made in Python have "
            "none). In Python, with the Policy of the script that made the run: "
            f"lit_grpo.export_checkpoint({str(checkpoint)!r}, DIRECTORY, policy=Policy(...))."
        )
    model: Mapping[str, Any] = read_config(path)["model"]
    parser = Parser()
    parser.add_argument("--policy", type=Policy)
    given = parser.parse_object({"policy": model.get("init_args", model)["policy"]})
    policy: Policy = parser.instantiate_classes(given).policy
    try:
        load_alone(policy)
    except UserError as error:
        raise UserError(f"{error} --export takes it from {path}.") from None
    return policy
