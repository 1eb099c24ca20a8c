"""The policy's weights under their names in a checkpoint, one at a time.

Gathers a sharded policy tensor by tensor and merges an adapter on the fly. Never changes the
policy and writes nothing.
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

from lit_grpo.types import UserError

NamedTensor = tuple[str, Tensor]
Deltas = dict[str, Callable[[], Tensor]]


def named_weights(model: Any) -> Iterator[NamedTensor]:
    """Every weight under its name in a checkpoint, as ``save_pretrained`` would write it.

    An adapter is merged, tied weights come once. Gathering is collective: every rank has to
    iterate to the end. Weights of an unsharded model may be its own memory: do not write to them.
    Fused weights (the experts of a layer) come apart after they have been gathered together.

    Args:
        model: A ``transformers`` model, or a ``peft`` model around one; sharded or not.

    Raises:
        ValueError: the names in a checkpoint follow from the whole model only.
    """
    base = without_peft(model)
    weights, deltas = base.state_dict(keep_vars=True), {}
    if base is not model:
        weights, deltas = _without_adapter(weights), _deltas(base, model.active_adapter)
    weights = _untied(base, weights, deltas)
    for names in _converted_together(base, weights):
        # Nothing here keeps a gathered tensor while the next is gathered.
        converted = revert_weight_conversion(
            base, {name: gather(weights[name], deltas.get(name)) for name in names}
        )
        while converted:
            yield converted.popitem()


def without_peft(model: Any) -> PreTrainedModel:
    """The ``transformers`` model within."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


def _without_adapter(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The base's weights by their names without adapter, trained copies in place of originals."""
    return {
        _plain(name): weight
        for name, weight in weights.items()
        if not re.search(r"\.(lora_\w+|original_module)\.", name)
    }


def _plain(name: str) -> str:
    return re.sub(r"\.(base_layer|modules_to_save\.\w+)(?=\.)", "", name)


def _deltas(base: PreTrainedModel, adapter: str) -> Deltas:
    """What the adapter adds to each weight that it is put on."""
    from peft.tuners.lora import LoraLayer

    layers: list[tuple[str, Any]] = [
        (path, layer) for path, layer in base.named_modules() if isinstance(layer, LoraLayer)
    ]
    assert not any(layer.lora_variant for _, layer in layers), "such an update is no plain product"
    return {
        _plain(f"{path}.{getattr(layer, 'parameter_name', 'weight')}"): partial(
            layer.get_delta_weight, adapter
        )
        for path, layer in layers
    }


def _untied(base: PreTrainedModel, weights: dict[str, Tensor], deltas: Deltas) -> dict[str, Tensor]:
    """The weights without those that are another one's twin; an adapter parts twins."""

    def is_twin(name: str) -> bool:
        other = base.all_tied_weights_keys.get(name, "")
        return weights.get(other) is weights[name] and deltas.keys().isdisjoint((name, other))

    return {name: weight for name, weight in weights.items() if not is_twin(name)}


def _converted_together(base: PreTrainedModel, weights: dict[str, Tensor]) -> list[list[str]]:
    """Names in groups that become one checkpoint tensor, or several; most stand alone."""
    transforms = getattr(base, "_weight_conversions", None)
    if transforms is None:  # a model that was not loaded
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
    if transforms:
        _check_converted(base, weights, list(groups.values()))
    return list(groups.values())


def _check_converted(
    base: PreTrainedModel, weights: dict[str, Tensor], groups: list[list[str]]
) -> None:
    """Group by group the names must become the same as all at once; tried without any data."""

    def converted(names: Iterable[str]) -> list[str]:
        empty = {name: torch.empty(weights[name].shape, device="meta") for name in names}
        return list(revert_weight_conversion(base, empty))

    streamed, whole = sorted(chain(*map(converted, groups))), sorted(converted(weights))
    if streamed != whole:
        raise UserError(
            f"weights of {type(base).__name__} cannot be sent: their names in a checkpoint must "
            f"follow from each alone, got {sorted({*streamed} ^ {*whole})[:4]} that follow from "
            "the whole model (a server would load wrong weights). Set model.engine to HFEngine, "
            "or model.policy.lora and let the engine send the adapter alone."
        )


@torch.no_grad()
def gather(weight: Tensor, delta: Callable[[], Tensor] | None = None) -> Tensor:
    """The whole tensor; a delta is added shard by shard, and rounded as the weight is."""
    weight = weight.detach()
    if delta is not None:
        weight = (weight + delta()).to(weight.dtype)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
