"""Compile the layers of a model that stage 3 of DeepSpeed partitions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import Cache

from lit_grpo.policy.sharding import layers_of


def compile_layers(body: Any) -> None:
    """Compile each layer between the hooks that gather its weights; every rank must call this.

    A body that is compiled as a whole would trace the hooks, until ranks wait for each other. Here
    they only surround the layers (DeepSpeed's leaf modules), which share their programs.

    Args:
        body: The decoder of a ``transformers`` model, before the engine is made.
    """
    from deepspeed.utils import set_z3_leaf_modules

    layers = layers_of(body)
    set_z3_leaf_modules(body, list({type(one) for one in layers}))
    for layer in layers:
        layer.forward = _compiled_without_cache(layer.forward)
    layers[0].register_forward_pre_hook(_require_gradient)


def _compiled_without_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that is compiled for training, and not while it samples."""
    compiled = torch.compile(forward, dynamic=True)

    @wraps(forward)
    def run(*args: Any, **settings: Any) -> Any:
        samples = any(isinstance(one, Cache) for one in settings.values())
        return (forward if samples else compiled)(*args, **settings)

    return run


def _require_gradient(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let the states that enter the first layer have a gradient, though embeddings are frozen.

    DeepSpeed takes the gradients of a layer once that of its input is there; without one, before
    they are computed.
    """
    states, *others = inputs
    if torch.is_grad_enabled() and not states.requires_grad:
        states = states.detach().requires_grad_()
    return states, *others
