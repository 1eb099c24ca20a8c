"""Add a low-rank adapter to a model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from lit_grpo.types import UserError, check_range, setting_error
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.spelling import did_you_mean


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """A low-rank adapter (arXiv 2106.09685); the reference is the policy without the adapter.

    Args:
        rank: Rank of the update.
        alpha: Scale of the update, which is multiplied by ``alpha / rank``.
        target_modules: Names of the linear layers to adapt, ``[q_proj, v_proj]``, or
            ``all-linear``.
        modules_to_save: Names of layers to train in full in addition to the adapter.

    Raises:
        UserError: a value is out of range.
    """

    rank: int = 16
    alpha: int = 32
    target_modules: list[str] | str = "all-linear"
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
        check_fields("model.policy.lora", self)
        names = self.target_modules
        if isinstance(names, str) and names != "all-linear":
            raise setting_error(
                "model.policy.lora.target_modules",
                "a list of names, or all-linear",
                repr(names),
                f"one name is [{names}]",
            )
        check_range("model.policy.lora.rank", self.rank, at_least=1)
        check_range("model.policy.lora.alpha", self.alpha, above=0)


def add_lora(model: PreTrainedModel, lora: LoRA) -> nn.Module:
    """Return the model with a new adapter and all other weights frozen.

    Raises:
        UserError: the model has no such layers, or one of them shares its weights with another.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=lora.target_modules,
        modules_to_save=lora.modules_to_save,
    )
    layers = dict(model.named_modules())
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(
            f"no adapter can be added to {type(model).__name__}: {error} "
            "Set model.policy.lora.target_modules."
        ) from None
    # By now peft has replaced names of experts, such as w1, by its own converted names.
    used = adapted.peft_config["default"]
    for key in ("target_modules", "modules_to_save"):
        if isinstance(names := getattr(used, key), Collection) and not isinstance(names, str):
            _refuse_unknown(sorted(names), layers, f"model.policy.lora.{key}")
    _refuse_tied_layers(adapted, model)
    return adapted


def _refuse_unknown(names: Sequence[str], layers: Mapping[str, nn.Module], key: str) -> None:
    """Raise if a name matches no layer; peft raises only if none of them does."""
    for name in names:
        if not any(f".{one}".endswith(f".{name}") for one in layers):
            known = {one.rpartition(".")[2]: layer for one, layer in layers.items()}
            linear = [one for one, layer in known.items() if isinstance(layer, nn.Linear)]
            raise UserError(
                f"{key} must name layers of {type(layers['']).__name__}, got {name!r} (it would "
                f"not be trained).{did_you_mean(name, known)} Set {key}; the linear layers are "
                f"{', '.join(sorted(linear))}."
            )


def _refuse_tied_layers(adapted: nn.Module, model: PreTrainedModel) -> None:
    """Raise if an adapted layer shares its weights with another, which merging would change too."""
    pairs = model.all_tied_weights_keys.items()
    tied = {name.removesuffix(".weight") for pair in pairs for name in pair}
    layers = {
        name.removeprefix("base_model.model.")
        for name, layer in adapted.named_modules()
        if hasattr(layer, "base_layer")
    }
    if both := sorted(tied & layers):
        raise UserError(
            f"no adapter can be added to {both[0]}: its weights are tied to those of another "
            "layer, which merging would change too. Remove it from "
            "model.policy.lora.target_modules; to train it in full, add it to modules_to_save."
        )


def is_adapter(path: str) -> bool:
    """Return whether a directory holds an adapter without its base model."""
    return (Path(path) / "adapter_config.json").is_file()


def base_of(adapter: str) -> str:
    """Return the directory or hub id of the model that an adapter was trained on."""
    settings = json.loads((Path(adapter) / "adapter_config.json").read_text())
    return str(settings["base_model_name_or_path"])
