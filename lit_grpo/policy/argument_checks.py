"""Check the arguments of a policy against each other, before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lit_grpo.policy.lora import LoRA, is_adapter
from lit_grpo.types import UserError, setting_error
from lit_grpo.types.settings import list_some

_OF_PEFT = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "target_modules",
    "modules_to_save": "modules_to_save",
}
"""Name of a setting in peft -> its name in `LoRA`."""


def refuse_model(path: object) -> None:
    """Refuse a model, or the config of one, that is given as a path."""
    if isinstance(path, Mapping):
        raise UserError(
            "path must be a directory or an id on the Hub, got a dict with "
            f"{list_some([*path], 3)}. For a model with random weights, write architecture={{...}}."
        )
    if isinstance(path, nn.Module):
        raise UserError(
            f"path must be a directory or an id on the Hub, got a {type(path).__name__} (every "
            "rank loads the weights itself, and so does a resume). Write the model with "
            "save_pretrained, and give its directory."
        )


def refuse_peft_config(lora: object) -> None:
    """Refuse the settings of an adapter under the names of peft."""
    given: Mapping[str, Any] = {}
    got, usual = "a dict of peft's", given
    if isinstance(lora, Mapping):
        given = lora
    elif type(lora).__name__ == "LoraConfig":
        given, got, usual = vars(lora), "a LoraConfig of peft", vars(type(lora)())
    if not given.keys() & {"r", "lora_alpha"}:
        return
    renamed = {ours: given.get(theirs, given.get(ours)) for theirs, ours in _OF_PEFT.items()}
    arguments = ", ".join(
        f"{name}={sorted(value) if isinstance(value, set) else value!r}"
        for name, value in renamed.items()
        if value is not None
    )
    others = [
        name
        for name, value in given.items()
        if name not in (*_OF_PEFT, *_OF_PEFT.values()) and value != usual.get(name)
    ]
    fix = f"write LoRA({arguments}), of lit_grpo.policy"
    if others:
        fix += f", which has no {list_some(others, 4)}"
    raise setting_error("model.policy.lora", "of type LoRA or None", got, fix)


def check_start(path: str | None, architecture: dict[str, Any] | None) -> None:
    """Check that the initial weights come from one place."""
    if (path is None) == (architecture is None):
        raise UserError(
            "a policy needs either a path (weights to start from) or an architecture (random "
            f"weights), got path={path!r} and architecture={architecture!r}. "
            "Set one of model.policy.path and model.policy.architecture, and the other, if a "
            "config sets it, to null."
        )


def check_merging(path: str | None, lora: LoRA | None, *, merge_lora: bool) -> None:
    """Check that there is a model that an adapter alone can be used with."""
    if not merge_lora and (lora is None or path is None or is_adapter(path)):
        raise UserError(
            "merge_lora: false writes only the adapter, so it needs model.policy.lora and a "
            "model.policy.path that is a full model. Set both, or merge_lora: true."
        )


def check_reasoning_tags(tags: tuple[str, str] | None) -> None:
    """Check that the tags around reasoning can be told apart."""
    if tags is not None and (len({*tags}) != 2 or "" in tags):
        rule = "two different texts, or null"
        raise setting_error("model.policy.reasoning_tags", rule, list(tags))
