"""Decide which weights an engine gets: all of them, or only the adapter."""

from __future__ import annotations

from typing import Any, Literal

from lit_grpo.types import UserError

WeightSync = Literal["auto", "full", "adapter"]


def sends_adapter(model: Any, weight_sync: WeightSync) -> bool:
    """Return whether only the adapter is sent to the engine.

    Raises:
        UserError: ``weight_sync`` is ``adapter``, but not only an adapter is trained.
    """
    config = getattr(model, "peft_config", None)
    is_adapter_enough = config is not None and not config["default"].modules_to_save
    if weight_sync == "adapter" and not is_adapter_enough:
        raise UserError(
            "weight_sync: adapter needs model.policy.lora without modules_to_save (an inference "
            "engine accepts only low-rank updates). Set model.engine.init_args.weight_sync to full."
        )
    return is_adapter_enough and weight_sync != "full"
