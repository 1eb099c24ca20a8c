"""Compile the layers of a model that stage 3 of DeepSpeed partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_grpo.policy.sharding import layers_of
from lit_grpo.types import UserError


def compile_layers(body: Any) -> None:
    """Compile each layer between the hooks that gather its weights; every rank must call this.

    A body that is compiled as a whole would trace the hooks, until ranks wait for each other. Here
    they only surround the layers (DeepSpeed's leaf modules). Layers of one kind share programs.

    Args:
        body: The decoder of a ``transformers`` model, before the engine is made.

    Raises:
        UserError: the layers cannot be compiled by themselves.
    """
    from deepspeed.utils import set_z3_leaf_modules

    layers = layers_of(body)
    if why := _why_not(layers):
        raise UserError(
            f"model.policy.compile must be false for {type(body).__name__} in stage 3 of "
            f"DeepSpeed: {why}. Or set trainer.strategy to fsdp2."
        )
    set_z3_leaf_modules(body, list({type(one) for one in layers}))
    for layer in layers:
        layer.forward = _compiled_without_cache(layer.forward)
        layer.register_forward_pre_hook(_require_gradient)


def _why_not(layers: Sequence[nn.Module]) -> str:
    """Return why layers cannot be compiled by themselves; empty if they can."""
    if not layers:
        return "transformers does not say which of its parts are layers"
    if max(Counter(one for layer in layers for one in layer.parameters()).values()) > 1:
        return "its layers share weights, whose gradients DeepSpeed would take too early"
    # Then it recomputes layers outside of their compiled forward passes.
    checkpoints_calls = "__call__" in vars(GradientCheckpointingLayer)
    if checkpoints_calls and any(getattr(one, "gradient_checkpointing", False) for one in layers):
        return "with gradient_checkpointing it needs a newer transformers (5.20)"
    return ""


def _compiled_without_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that is compiled for training, and not while it samples."""
    compiled = torch.compile(forward, dynamic=True)

    @wraps(forward)
    def run(*args: Any, **settings: Any) -> Any:
        samples = any(isinstance(one, Cache) for one in (*args, *settings.values()))
        return (forward if samples else compiled)(*args, **settings)

    return run


def _require_gradient(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let the states that enter a layer have a gradient, though all before them is frozen.

    DeepSpeed takes the gradients of a layer once that of its input is there; without one, before
    they are computed.
    """
    states, *others = inputs
    if torch.is_grad_enabled() and states.is_floating_point() and not states.requires_grad:
        states = states.detach().requires_grad_()
    return states, *others
