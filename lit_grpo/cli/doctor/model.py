"""Check that the policy can be loaded, and describe it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_grpo.cli.built_run import BuiltRun
from lit_grpo.cli.doctor.findings import Finding, failed, ok, refused, remark
from lit_grpo.cli.estimate.model_sizes import trained
from lit_grpo.policy.files.vocabulary import check_special_tokens
from lit_grpo.policy.files.weight_files import check_weight_files
from lit_grpo.policy.lora import is_adapter
from lit_grpo.runs.tables import with_unit
from lit_grpo.training.checks.compatibility import check_completions_fit
from lit_grpo.training.checks.end_tokens import check_ends
from lit_grpo.types import UserError

WEIGHT_FILES = ("*.safetensors", "*.bin")


def check_model(run: BuiltRun) -> Iterator[Finding]:
    """Read the tokenizer and the config of the model, and build it without weights."""
    policy = run.module.policy
    run.tokenizer.read()
    outline: Any = run.outline.read()
    check_special_tokens(outline.config, run.tokenizer.get())
    total = sum(one.numel() for one in outline.parameters())
    num_trained = sum(one.numel() for one in trained(outline))
    share = "all of them trained" if num_trained == total else f"{with_unit(num_trained)} trained"
    positions = "no limit of" if run.positions is None else f"{run.positions:,}"
    source = policy.path or "random weights"
    yield ok(
        f"{source}: {with_unit(total)} parameters in {policy.dtype}, {share}; "
        f"{positions} positions."
    )
    if policy.path is not None:
        yield from _weight_files(policy.path)
    if run.module.samples_in_training or run.val_prompts:
        check_completions_fit(run.positions, run.module.sampling)
    if run.grpo:
        objective = run.grpo.objective
        if warning := check_ends(outline, run.tokenizer.get(), run.grpo.sampling, objective):
            yield remark(warning)


def _weight_files(path: str) -> Iterator[Finding]:
    """Yield a failure if a directory has the config of a model but no or damaged weights."""
    directory = Path(path)
    try:
        check_weight_files(path, "model.policy.path")
    except UserError as error:
        yield refused(str(error))
        return
    if not directory.is_dir() or is_adapter(path):
        return
    if not any(any(directory.glob(pattern)) for pattern in WEIGHT_FILES):
        yield failed(
            f"{directory} has a config but no weights ({' or '.join(WEIGHT_FILES)}).",
            "Set model.policy.path to a directory that save_pretrained wrote or to a hub id.",
        )
