"""A low-rank adapter: its settings, and putting it on a model. Trains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from lit_grpo.types import UserError


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """A low-rank adapter (arXiv 2106.09685); the reference is the policy with it switched off.

    Args:
        rank: Rank of the update.
        alpha: The update is scaled by ``alpha / rank``.
        target_modules: Names of the linear layers to adapt, or ``all-linear``.
        modules_to_save: Layers that are trained in full beside the adapter.
    """

    rank: int = 16
    alpha: int = 32
    target_modules: list[str] | str = "all-linear"
    modules_to_save: list[str] | None = None


def add_lora(model: PreTrainedModel, lora: LoRA) -> nn.Module:
    """The model with a fresh adapter, which alone is trained.

    Raises:
        ValueError: it has no such layers, or one of them shares its weights with another.
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
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(
            f"no adapter can be put on {type(model).__name__}: {error} "
            "Set model.policy.lora.target_modules."
        ) from None
    _refuse_adapted_twins(adapted, model)
    return adapted


def _refuse_adapted_twins(adapted: nn.Module, model: PreTrainedModel) -> None:
    """Merging the adapter of a tied layer would change the layer that shares its weights, too."""
    pairs = model.all_tied_weights_keys.items()
    twins = {name.removesuffix(".weight") for pair in pairs for name in pair}
    layers = {
        name.removeprefix("base_model.model.")
        for name, layer in adapted.named_modules()
        if hasattr(layer, "base_layer")
    }
    if both := sorted(twins & layers):
        raise UserError(
            f"no adapter can be put on {both[0]}: its weights are tied to another layer's, which "
            "merging would change, too. Take it out of model.policy.lora.target_modules; to train "
            "it in full name it in modules_to_save."
        )


def is_adapter(path: str) -> bool:
    """Whether an adapter alone stands in this directory."""
    return (Path(path) / "adapter_config.json").is_file()
