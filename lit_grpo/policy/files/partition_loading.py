"""Read a rank's partitions of weights that stage 3 of DeepSpeed has partitioned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_grpo.policy.files.saved_weights import SavedWeights


@torch.no_grad()
def load_partitions(
    weights: Mapping[str, Tensor],
    base: PreTrainedModel,
    saved: SavedWeights,
    files: Mapping[str, Any],
) -> None:
    """Read this rank's partitions of weights from the safetensors files that have all of them.

    Args:
        weights: Name -> partitioned parameter.
        base: The model.
        files: The open files, by the names of their weights.
    """
    for name, source in saved.names.items():
        _load_partition(weights[name], files[source].get_slice(source))
    for name, value in saved.converted(base, files):
        _load_partition(weights[name], value)


def _load_partition(weight: Any, saved: Any) -> None:
    """Read the values of a partition, which lie in consecutive rows of the first dimension.

    A partition is a part of the flattened weight; what it has beyond the end is padding.
    """
    size = weight.ds_tensor.numel()
    start = min(size * weight.ds_zero_partition_rank, weight.ds_numel)
    end = min(start + size, weight.ds_numel)
    if start == end:
        return
    width = weight.ds_shape[1:].numel()
    first = start // width
    rows = saved[first : -(-end // width)] if weight.ds_shape else saved[...]
    values: Tensor = rows.flatten()
    weight.ds_tensor[: end - start].copy_(values[start - first * width : end - first * width])
