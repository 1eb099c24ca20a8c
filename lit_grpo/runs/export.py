"""Write a checkpoint of a run as a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_grpo.policy import Policy
from lit_grpo.policy.files.model_source import POLICY_PATH, refuse_changed, refuse_other_settings
from lit_grpo.runs.checkpoints.files import LAST, read_checkpoint, why_unusable
from lit_grpo.runs.checkpoints.resume import is_checkpoint
from lit_grpo.runs.files.prompt_format import PROMPT_FORMAT, write_prompt_format
from lit_grpo.runs.files.space import warn_of_space
from lit_grpo.runs.report.model_card import write_exported_card
from lit_grpo.types import UserError, setting_error
from lit_grpo.types.atomic import replacing
from lit_grpo.types.paths import at_home
from lit_grpo.types.settings import check_type


def export_checkpoint(
    checkpoint: str | Path, directory: str | Path, *, policy: Policy | str
) -> None:
    """Write the policy of a checkpoint as ``final/`` is written, completely or not at all.

    Args:
        checkpoint: A checkpoint of a run, a file or a directory: ``RUN/checkpoints/best.ckpt``.
        directory: A new or empty directory.
        policy: A new one with the settings of the run; its path alone if it has no others.

    Raises:
        UserError: there is no such checkpoint, the directory has files, or the policy cannot be
            loaded, is not the checkpoint's, or is in use.
    """
    checkpoint, directory = Path(at_home(checkpoint)), Path(at_home(directory))
    refuse_files(directory, "directory")
    if not checkpoint.exists():
        raise setting_error("checkpoint", "one of a run", checkpoint, "there is none")
    if not is_checkpoint(checkpoint):
        run = next((one for one in (checkpoint, checkpoint.parent) if _has_last(one)), None)
        why = f"to export the last one give {run / 'checkpoints' / LAST}" if run else ""
        raise setting_error("checkpoint", "one of a run", checkpoint, why)
    if why := why_unusable(checkpoint):
        raise setting_error("checkpoint", "intact", checkpoint, why)
    policy = Policy(policy) if isinstance(policy, str) else policy
    check_type("policy", policy, Policy)
    if policy.model is not None:
        raise UserError(
            "policy must be a new Policy with the settings of the run, got one that a module uses "
            "(its weights would be overwritten)."
        )
    load_alone(policy)
    write_model(checkpoint, directory, policy)


def _has_last(run_dir: Path) -> bool:
    return (run_dir / "checkpoints" / LAST).exists()


def refuse_files(directory: Path, setting: str) -> None:
    """Raise UserError if the directory is a file or has files."""
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        what = "a directory with files" if directory.is_dir() else "a file"
        raise UserError(f"{setting} must be a new or empty directory, got {directory}, {what}.")


def load_alone(policy: Policy) -> None:
    """Load a policy that only has to be loaded and written, not run."""
    policy.attn_implementation, policy.packing = None, False
    policy.load(with_reference=False)


def write_model(checkpoint: Path, directory: Path, policy: Policy) -> None:
    """Load the weights of a checkpoint into a loaded policy, and write it with a model card."""
    saved = load_weights(policy, checkpoint)
    num_bytes, memory_bytes = policy.saved_bytes()
    warn_of_space(directory, num_bytes=num_bytes, memory_bytes=memory_bytes)
    with replacing(directory) as folder:
        policy.save_pretrained(folder)
        write_prompt_format(folder, saved.get(PROMPT_FORMAT))
        write_exported_card(folder, checkpoint, policy)


def load_weights(policy: Policy, checkpoint: Path) -> Mapping[str, Any]:
    """Load what the checkpoint has; a frozen base of an adapter comes from ``policy.path``.

    Returns:
        The checkpoint, without the states of the optimizers.

    Raises:
        UserError: the checkpoint is one of a policy with other settings, or its base has changed.
    """
    saved = read_checkpoint(checkpoint, with_optimizers=False)
    refuse_other_settings(saved, policy.weight_settings())
    if policy.lora is not None and policy.loaded_from is not None:
        refuse_changed(saved, {POLICY_PATH: policy.loaded_from})
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
            f"{checkpoint} does not fit the policy, which must have the settings of the run: "
            f"{len(different)} weights are in one of them only, such as {different[0]!r}."
        )
    return saved
