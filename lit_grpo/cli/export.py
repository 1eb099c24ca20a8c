"""Write a checkpoint of a run as a Hugging Face model, by the run's own config."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_grpo.cli.parsing.configs import read_config
from lit_grpo.cli.parsing.parser import Parser
from lit_grpo.cli.places import check_place
from lit_grpo.policy import Policy
from lit_grpo.policy.model_source import refuse_changed
from lit_grpo.runs.checkpoints.files import read_checkpoint
from lit_grpo.runs.files.space import warn_of_space
from lit_grpo.runs.report.model_card import write_exported_card
from lit_grpo.runs.trainer import silence_chatter
from lit_grpo.types import UserError
from lit_grpo.types.atomic import replacing


def export(checkpoint: Path, run_dir: Path, directory: Path) -> None:
    """Write the policy of a checkpoint as ``final/`` is written, completely or not at all.

    Args:
        checkpoint: A checkpoint of the run.
        run_dir: Directory of the run.
        directory: Where to write, which `refuse_files` has checked.

    Raises:
        UserError: the policy cannot be made from the run's config.
    """
    silence_chatter()
    sys.path.insert(0, os.getcwd())  # for a policy class of the user's
    policy = _read_policy(run_dir, checkpoint)
    num_bytes, memory_bytes = policy.saved_bytes()
    warn_of_space(directory, num_bytes=num_bytes, memory_bytes=memory_bytes)
    with replacing(directory) as folder:
        policy.save_pretrained(folder)
        write_exported_card(folder, checkpoint, run_dir, policy)


def refuse_files(directory: Path) -> None:
    """Raise UserError if the directory is a file, has files, or cannot be made."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        what = "a directory with files" if directory.is_dir() else "a file"
        raise UserError(f"--export must be a new or empty directory, got {directory}, {what}.")
    is_there = directory.exists()  # and will be replaced
    check_place("--export", directory, directory.absolute().parent if is_there else directory)


def _read_policy(run_dir: Path, checkpoint: Path) -> Policy:
    """Return the policy with the weights of a checkpoint."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise UserError(
            f"--export makes the policy from {path}, and there is none (runs made in Python have "
            "none). In Python make the module as for the run, call module.configure_model() and "
            "module.load_state_dict(torch.load(CHECKPOINT, weights_only=False)['state_dict']), "
            "then module.policy.save_pretrained(DIR)."
        )
    model: Mapping[str, Any] = read_config(path)["model"]
    parser = Parser()
    parser.add_argument("--policy", type=Policy)
    given = parser.parse_object({"policy": model.get("init_args", model)["policy"]})
    policy: Policy = parser.instantiate_classes(given).policy
    policy.attn_implementation, policy.packing = None, False  # it only has to be loaded
    try:
        policy.load(with_reference=False)
    except UserError as error:
        raise UserError(f"{error} --export takes it from {path}.") from None
    _load_weights(policy, checkpoint)
    return policy


def _load_weights(policy: Policy, checkpoint: Path) -> None:
    """Load what the checkpoint has; a frozen base of an adapter comes from ``policy.path``.

    Raises:
        UserError: the checkpoint is one of a different policy, or its base has changed.
    """
    saved = read_checkpoint(checkpoint, with_optimizers=False)
    if policy.lora is not None and policy.loaded_from is not None:
        refuse_changed(saved, {"model.policy.path": policy.loaded_from})
    weights = {
        name.removeprefix("policy."): weight
        for name, weight in saved["state_dict"].items()
        if name.startswith("policy.model.")
    }
    if policy.path is None:
        required = set(policy.state_dict())
    else:
        required = {name for name, one in policy.named_parameters() if one.requires_grad}
    try:
        unknown = policy.load_state_dict(weights, strict=False).unexpected_keys
    except RuntimeError as error:
        raise UserError(f"{checkpoint} does not fit the policy of the run: {error}") from None
    if different := sorted(required - weights.keys()) + unknown:
        raise UserError(
            f"{checkpoint} does not fit the policy of the run's config.yaml: {len(different)} "
            f"weights are in one of them only, such as {different[0]!r}."
        )
