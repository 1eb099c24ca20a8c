"""Partition a model for stage 3 of DeepSpeed as it is loaded, before there is an engine.

The engine would only partition it once all of it is on the device of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lit_grpo.policy.sharding import is_partitioned, layers_of, whole

OTHERWISE = {"mics_shard_size", "zero_hpz_partition_size", "zero_quantized_nontrainable_weights"}
"""Settings with which a rank keeps partitions twice, others than its own, or in 8 bits."""


def keeps_partitions(zero: Mapping[str, Any]) -> bool:
    """Return whether a rank keeps a single partition of a weight in memory, with its values.

    Args:
        zero: The settings ``zero_optimization`` of DeepSpeed.
    """
    is_swapped = (zero.get("offload_param") or {}).get("device") == "nvme"
    return not is_swapped and zero.keys().isdisjoint(OTHERWISE)


def partition(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Partition the parameters of a model in place; every rank must call this.

    One whole parameter at a time is on the device. One on the meta device gets memory for its
    partition, without values; the others get rank 0's values.

    Args:
        config: The settings of DeepSpeed.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    # With a module DeepSpeed also replaces the linear function by one that keeps no whole weights.
    init: Any = Init(module=nn.ModuleList(), config_dict_or_path={**config})
    move_buffers(model, init.local_device)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, one in list(module._parameters.items()):
            if one is None or is_partitioned(one):
                continue
            if one.is_meta and one not in replaced:
                replaced[one] = _partitioned_without_values(one, init)
            elif not one.is_meta:
                init._convert_to_zero_parameters([one])
            module._parameters[name] = replaced.get(one, one)


def _partitioned_without_values(parameter: nn.Parameter, init: Any) -> nn.Parameter:
    empty = torch.empty_like(parameter, device=init.local_device)
    new: Any = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    init._convert_to_deepspeed_param(new)
    new.partition()
    partitioned: nn.Parameter = new
    return partitioned


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers to a device, as the engine does only with a model that is not partitioned."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(device)


@contextmanager
def gathered_in_turn(model: Any) -> Iterator[None]:
    """Gather each layer of a model while it runs, and what is outside of them within the context.

    For forward passes without an engine, which would have hooks for this.
    """
    layers = layers_of(model) if any(map(is_partitioned, model.parameters())) else []
    parts = {part for layer in layers for part in layer.modules() if part is not layer}
    layers = [one for one in layers if one not in parts]  # no weight is gathered twice
    inside = {one for layer in layers for one in layer.parameters()}
    with ExitStack() as hooks, whole([one for one in model.parameters() if one not in inside]):
        for layer in layers:
            gathering = _Gathering(layer)
            hooks.callback(layer.register_forward_pre_hook(gathering.begin, prepend=True).remove)
            hooks.callback(layer.register_forward_hook(gathering.end, always_call=True).remove)
        yield


class _Gathering:
    """Hooks around the forward pass of a layer that keep its parameters whole."""

    def __init__(self, layer: nn.Module) -> None:
        self._context = whole(list(layer.parameters()))

    def begin(self, layer: nn.Module, inputs: Any) -> None:
        self._context.__enter__()

    def end(self, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        self._context.__exit__(None, None, None)
