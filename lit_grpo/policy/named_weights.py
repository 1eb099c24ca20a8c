"""Iterate over the policy's weights under their names in a checkpoint.

A sharded policy is gathered tensor by tensor, and an adapter is merged on the fly, so one
whole tensor is in memory at a time. The policy is not changed. Engines get the weights this way,
and so does every directory that is written.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from lit_grpo.policy.sharding import is_partitioned, whole, whole_shape

NamedTensor = tuple[str, Tensor]
Deltas = dict[str, Callable[[], Tensor]]


def named_weights(model: Any) -> Iterator[NamedTensor]:
    """Yield every weight under its name in a checkpoint, as ``save_pretrained`` would write it.

    An adapter is merged, and tied weights are yielded once. Gathering is collective: every rank
    must iterate to the end. The tensors may share memory with the model, so do not write to them.
    Fused weights (the experts of a layer) are gathered together and then split, and all weights are
    if the names in a checkpoint can only be derived from the whole model.

    Args:
        model: A ``transformers`` model, or a ``peft`` model around one; sharded or not.
    """
    base = unwrap_peft(model)
    weights, deltas = base.state_dict(keep_vars=True), {}
    if base is not model:
        weights, deltas = _base_weights(weights), _deltas(base, model.active_adapter)
    weights = _without_tied(base, weights, deltas)
    for names in _conversion_groups(base, weights):
        # No variable may hold a gathered tensor while the next one is gathered.
        converted = revert_weight_conversion(
            base, {name: gather(weights[name], deltas.get(name)) for name in names}
        )
        while converted:
            yield converted.popitem()


def base_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights, without an adapter, by the base model's own names; tied ones once."""
    base = unwrap_peft(model)
    weights = base.state_dict(keep_vars=True)
    return _without_tied(base, weights if base is model else _base_weights(weights), {})


def unwrap_peft(model: Any) -> PreTrainedModel:
    """Return the ``transformers`` model, without ``peft`` around it."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


def _base_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the base model's weights under its own names, with layers trained in full replaced."""
    return {
        _base_name(name): weight
        for name, weight in weights.items()
        if not re.search(r"\.(lora_\w+|original_module)\.", name)
    }


def _base_name(name: str) -> str:
    return re.sub(r"\.(base_layer|modules_to_save\.\w+)(?=\.)", "", name)


def _deltas(base: PreTrainedModel, adapter: str) -> Deltas:
    """Return, by weight name, a function that computes the adapter's addition to that weight."""
    from peft.tuners.lora import LoraLayer

    layers: list[tuple[str, Any]] = [
        (path, layer) for path, layer in base.named_modules() if isinstance(layer, LoraLayer)
    ]
    assert not any(layer.lora_variant for _, layer in layers), "only plain LoRA can be merged"
    return {
        _base_name(f"{path}.{getattr(layer, 'parameter_name', 'weight')}"): partial(
            _delta, layer, adapter
        )
        for path, layer in layers
    }


def _delta(layer: Any, adapter: str) -> Tensor:
    """Return what ``merge_and_unload`` of ``peft`` adds to a weight, bit by bit."""
    from peft.tuners.lora import Embedding

    factors = [one for name, one in layer.named_parameters() if "lora_" in name]
    with whole(factors):
        delta: Tensor = layer.get_delta_weight(adapter)
    is_rounded = isinstance(layer, Embedding)  # others add it as it is
    return delta.to(layer.get_base_layer().weight.dtype) if is_rounded else delta


def _without_tied(
    base: PreTrainedModel, weights: dict[str, Tensor], deltas: Deltas
) -> dict[str, Tensor]:
    """Drop the weights that are tied to another one; an adapter on either unties them."""

    def is_tied(name: str) -> bool:
        other = base.all_tied_weights_keys.get(name, "")
        return weights.get(other) is weights[name] and deltas.keys().isdisjoint((name, other))

    return {name: weight for name, weight in weights.items() if not is_tied(name)}


def _conversion_groups(base: PreTrainedModel, weights: dict[str, Tensor]) -> list[list[str]]:
    """Group the names whose tensors are converted to checkpoint tensors together."""
    transforms = getattr(base, "_weight_conversions", None)
    if transforms is None:  # the model was built, not loaded
        transforms = get_model_conversion_mapping(base, add_legacy=False)
    converters = [
        transform.reverse_transform()
        for transform in reversed(transforms)
        if isinstance(transform, WeightConverter)
    ]
    groups = defaultdict(list)
    for name in weights:
        matches = (converter.rename_source_key(name) for converter in converters)
        groups[next((new for new, pattern in matches if pattern is not None), name)].append(name)
    if transforms and not _can_convert_apart(base, weights, list(groups.values())):
        return [list(weights)]
    return list(groups.values())


def _can_convert_apart(
    base: PreTrainedModel, weights: dict[str, Tensor], groups: list[list[str]]
) -> bool:
    """Return, by empty tensors, whether converting by groups gives the same names as at once."""

    def converted(names: Iterable[str]) -> list[str]:
        shapes = {name: whole_shape(weights[name]) for name in names}
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return list(revert_weight_conversion(base, empty))

    return sorted(chain(*map(converted, groups))) == sorted(converted(weights))


@torch.no_grad()
def gather(weight: Tensor, delta: Callable[[], Tensor] | None = None) -> Tensor:
    """Return the whole tensor, plus a delta that is added shard by shard.

    The sum is rounded once to the dtype of the weight, as in ``merge_and_unload`` of ``peft``.
    """
    with whole([weight]):
        value = weight.detach()
        if delta is not None:
            value = (value + delta()).to(value.dtype)
        elif is_partitioned(weight):
            value = value.clone()  # at the end of the context it is freed
    return value.full_tensor() if isinstance(value, DTensor) else value
