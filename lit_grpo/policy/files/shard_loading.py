"""Load a sharded model from its files, so that no rank ever has all of its weights.

Each rank builds the model with placeholders, which have shapes and no memory. Once it is sharded,
each rank reads its parts from the safetensors files.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from lit_grpo.policy.files.loading import model_without_weights, outline_model
from lit_grpo.policy.files.partition_loading import load_partitions
from lit_grpo.policy.files.saved_weights import SavedWeights, find_weights
from lit_grpo.policy.files.source_checks import is_hub_id
from lit_grpo.policy.files.weight_files import check_weight_files
from lit_grpo.policy.lora import LoRA, is_adapter
from lit_grpo.policy.named_weights import base_weights
from lit_grpo.policy.sharding import is_partitioned

log = logging.getLogger(__name__)

PATTERNS = ["*.json", "*.safetensors", "*.py"]


def weights_to_read_in_parts(
    path: str | None, lora: LoRA | None, **options: Any
) -> SavedWeights | None:
    """Return the weights of files from which every rank can read its parts.

    None if each rank has to load the whole model: there are no safetensors files, they do not have
    all of its weights as it needs them, or LoRA trains layers in full, which are copied from loaded
    ones.

    Args:
        options: As for `load_model`.
    """
    if path is None or is_adapter(path) or (lora is not None and lora.modules_to_save):
        return None
    check_weight_files(path, "model.policy.path")
    directory = Path(snapshot_download(path, allow_patterns=PATTERNS) if is_hub_id(path) else path)
    if not any(directory.glob("*.safetensors")):
        return None
    return find_weights(directory, outline_model(path, **options))


@rank_zero_only
def warn_of_whole_load(model: PreTrainedModel) -> None:
    """Warn that every rank has loaded a whole model, with the possible reasons."""
    log.warning(
        "Every rank has the whole policy in host memory (%.3g GiB each) before it keeps its part: "
        "an adapter is merged on loading, lora.modules_to_save is set, or the files are not "
        "safetensors with all weights of the model.",
        sum(one.nbytes for one in model.parameters()) / 2**30,
    )


def model_of_placeholders(path: str, **options: Any) -> PreTrainedModel:
    """Return what `load_model` would load, with placeholders in host memory for its weights."""
    with init_empty_weights(include_buffers=False):
        model = model_without_weights(path, **options)
    _replace_parameters(model, _placeholder)
    return model


def _placeholder(parameter: nn.Parameter) -> Tensor:
    """Return zeros of a parameter's shape, expanded from one element.

    Stacked experts are expanded from one matrix, since their products need contiguous matrices.
    """
    is_stack = parameter.ndim > 2
    zeros = torch.zeros(parameter.shape[-2:] if is_stack else (), dtype=parameter.dtype)
    return zeros.expand(parameter.shape)


def drop_placeholders(model: PreTrainedModel) -> None:
    """Move placeholders to the meta device, from where the model can be sharded."""

    _replace_parameters(model, lambda one: one.to("meta") if _is_placeholder(one) else one)


def copy_without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose weights are on the meta device."""
    weights = {id(p): nn.Parameter(p.detach().to("meta")) for p in model.parameters()}
    return copy.deepcopy(model, weights)


@torch.no_grad()
def copy_shards(model: nn.Module, copied: PreTrainedModel, device: str) -> None:
    """Give a sharded copy without weights the weights of its model, which is sharded alike."""
    _allocate(copied, device)
    for one, current in zip(copied.parameters(), model.parameters(), strict=True):
        _shard(one).copy_(_shard(current))


def _shard(parameter: nn.Parameter) -> Tensor:
    """Return what a rank has of a parameter."""
    partitioned: Any = parameter
    shard: Tensor = partitioned.ds_tensor if is_partitioned(parameter) else parameter
    return shard


def _is_placeholder(parameter: nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() < parameter.nbytes


def _replace_parameters(model: PreTrainedModel, make: Callable[[nn.Parameter], Tensor]) -> None:
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            new = nn.Parameter(make(one).detach(), requires_grad=one.requires_grad)
            module.register_parameter(name, new)
    model.tie_weights()


def load_shards(model: Any, base: PreTrainedModel, saved: SavedWeights, device: str) -> None:
    """Read this rank's parts of a sharded model; every rank must call this.

    Weights that files have in pieces, such as the experts of a layer, are whole in host memory one
    after the other.

    Args:
        model: The model, or ``peft`` around it.
        device: Where the weights go.
    """
    with saved.opened() as files:
        if any(map(is_partitioned, base.parameters())):
            load_partitions(base_weights(model), base, saved, files)
        else:
            _allocate(base, device)
            weights = {name: one.detach() for name, one in base_weights(model).items()}
            same = {source: weights[name] for name, source in saved.names.items()}
            load(same, storage_reader=HuggingFaceStorageReader(str(saved.directory)))
            for name, value in saved.converted(base, files):
                _copy_part(weights[name], value)
    untyped: Any = base
    untyped._weight_conversions = list(saved.transforms)  # as if `transformers` had loaded it


@torch.no_grad()
def _copy_part(weight: Tensor, value: Tensor) -> None:
    """Give a weight, which may be sharded, its part of a value that every rank has."""
    if isinstance(weight, DTensor):
        part = distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.to_local().copy_(part.to_local())
    else:
        weight.copy_(value)


def _allocate(model: PreTrainedModel, device: str) -> None:
    """Give memory to weights on the meta device."""
    untyped: Any = model  # torch does not annotate _apply
    untyped._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one)
    model.tie_weights()
