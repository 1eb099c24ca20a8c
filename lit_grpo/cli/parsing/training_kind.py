"""Find out whether a command line is for GRPO or for supervised fine-tuning (SFT)."""

from __future__ import annotations

import re
from inspect import signature

from lightning.pytorch import LightningModule

from lit_grpo.cli.commands import CHECKING, PLANNING, TRAINING
from lit_grpo.cli.parsing.invocation import Invocation, last_value
from lit_grpo.training import GRPOModule, SFTModule
from lit_grpo.types import UserError


def choose_model(command: str, invocation: Invocation) -> type[LightningModule]:
    """Return the class whose arguments are the keys of ``model``.

    The config of an SFT run can be validated, so the command alone does not tell.
    """
    if command not in TRAINING and invocation.is_sft and invocation.has_rewards:
        raise UserError(
            "the configs must belong to one training, and one has model.target_column, which only "
            "SFT has, another model.rewards, which only GRPO has. Use the config, or the run, of "
            "one of them."
        )
    if command == "fit" and invocation.is_sft:
        raise UserError(
            "fit needs the config of a GRPO training, and this one has model.target_column, which "
            "only SFT has. Use lit-grpo sft."
        )
    if command == "sft" and invocation.has_rewards:
        raise UserError(
            "sft needs the config of an SFT run, and this one has model.rewards, which only GRPO "
            "has. Use lit-grpo fit, or give a config without rewards"
            f"{' (null does not remove them)' if _nulls_rewards(invocation) else ''}."
        )
    may_be_sft = command in ("validate", "test")
    may_be_sft |= command in (CHECKING, PLANNING) and not _has_grpo_keys(invocation)
    is_plain_sft = may_be_sft and not (invocation.has_rewards or invocation.has_model_class)
    is_sft = command == "sft" or invocation.is_sft or is_plain_sft
    return SFTModule if is_sft else GRPOModule


def _nulls_rewards(invocation: Invocation) -> bool:
    """Return whether null is given for the rewards, in a file or on the command line."""
    models = [config.get("model") for config in invocation.configs]
    in_file = any(isinstance(one, dict) and one.get("rewards", "") is None for one in models)
    return in_file or last_value("model.rewards", [], invocation.arguments) == "null"


def _has_grpo_keys(invocation: Invocation) -> bool:
    """Return whether keys of ``model`` are given that only GRPO has."""
    models = [config.get("model") for config in invocation.configs]
    keys = {key for model in models if isinstance(model, dict) for key in model}
    given = (re.match(r"--model\.(\w+)", argument) for argument in invocation.arguments)
    keys |= {match[1] for match in given if match}
    return not keys.isdisjoint(keys_of_grpo())


def keys_of_grpo() -> set[str]:
    """Return the keys of ``model`` that only GRPO has."""
    ours, others = (set(signature(kind).parameters) for kind in (GRPOModule, SFTModule))
    return ours - others
