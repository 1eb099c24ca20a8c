"""Checkpoints of sharded models: a directory to which every rank writes its part.

The tensors are in the format of ``torch.distributed.checkpoint``, which any number of ranks can
read; everything else is in one file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_grpo.distributed.deepspeed_checkpoints import ZeROTraining
from lit_grpo.distributed.ranks import get_rank
from lit_grpo.policy.sharding import is_partitioned
from lit_grpo.types.atomic import sync_files

OTHERS = "meta.pt"
"""The file with everything that is not a tensor of the model or of the optimizers."""
DEEPSPEED = "deepspeed"
"""Key of the fields of the `Partition` of a checkpoint that DeepSpeed wrote."""
WRITE = "write_tensors"
"""Key of a function that writes the tensors of a checkpoint to a directory, if that is not done
here; it is not saved."""
ZERO_TAG = "zero"
"""The folder with the tensors that DeepSpeed wrote."""
_TENSORS = ".metadata"
_WEIGHTS = "state_dict"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How DeepSpeed partitions tensors; by itself it reads only files of the same partition."""

    stage: int
    num_ranks: int


def is_sharded(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether the weights of a checkpoint are shards."""
    shards = (isinstance(one, DTensor) for one in checkpoint[_WEIGHTS].values())
    return WRITE in checkpoint or any(shards)


def is_deepspeed(directory: Path) -> bool:
    """Return whether the tensors of a checkpoint are in DeepSpeed's own format."""
    return (directory / ZERO_TAG).is_dir()


def is_complete(directory: Path) -> bool:
    """Return whether a directory has the parts of a sharded checkpoint."""
    has_tensors = (directory / _TENSORS).is_file() or is_deepspeed(directory)
    return (directory / OTHERS).is_file() and has_tensors


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; a tensor that is not sharded itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if is_partitioned(tensor):
        flat: Any = tensor
        part: Tensor = flat.ds_tensor
        return part[: max(0, flat.ds_numel - get_rank() * part.numel())]  # the rest is padding
    return tensor


def save_sharded(
    checkpoint: Mapping[str, Any], directory: Path, *, background: ProcessGroup | None = None
) -> Callable[[], object]:
    """Write a checkpoint to an existing empty directory; every rank must call this.

    Args:
        background: A group of all ranks, with a backend for the CPU, that only this uses. With one,
            shards are copied to host memory and written by a thread, except DeepSpeed's.

    Returns:
        A function that waits until this rank's part is written; on rank 0, until all parts are.
    """
    others = dict(checkpoint)
    weights, optimizers = others.pop(_WEIGHTS), others.pop("optimizer_states", [])
    if get_rank() == 0:
        torch.save({name: one for name, one in others.items() if name != WRITE}, directory / OTHERS)
    if WRITE in others:
        others[WRITE](str(directory))
        sync_files(directory)
        return lambda: None
    tensors = {_WEIGHTS: weights, **_by_number(optimizers)}
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True)
    if background is None:
        save(tensors, storage_writer=writer)
        return lambda: None
    future = async_save(tensors, storage_writer=writer, process_group=background)
    assert isinstance(future, Future)
    return future.result


def _by_number(optimizers: Sequence[Any]) -> dict[str, Any]:
    return {f"optimizer_{number}": one for number, one in enumerate(optimizers)}


def read_others(directory: Path, *, weights_only: bool | None = False) -> dict[str, Any]:
    """Return a sharded checkpoint without its tensors."""
    others: dict[str, Any] = torch.load(
        directory / OTHERS, map_location="cpu", weights_only=weights_only
    )
    return others


def read_whole(directory: Path, *, with_optimizers: bool = True) -> dict[str, Any]:
    """Return a sharded checkpoint as one that is not sharded, in this process alone."""
    if is_deepspeed(directory):
        return _read_whole_zero(directory, with_optimizers=with_optimizers)
    tensors: dict[str, Any] = {}
    keys = None if with_optimizers else {_WEIGHTS}
    _load_state_dict(
        tensors,
        storage_reader=FileSystemReader(directory),
        planner=_EmptyStateDictLoadPlanner(keys=keys),
        no_dist=True,
    )
    optimizers = [one for name, one in tensors.items() if name != _WEIGHTS]
    return read_others(directory) | {
        _WEIGHTS: tensors[_WEIGHTS],
        "optimizer_states": [_with_numbers(one) for one in optimizers],
    }


def _read_whole_zero(directory: Path, *, with_optimizers: bool) -> dict[str, Any]:
    saved, others = ZeROTraining(directory / ZERO_TAG), read_others(directory)
    whole = others | {_WEIGHTS: {name: saved.weight(name) for name in others["weight_names"]}}
    if not with_optimizers:
        return whole
    groups = [
        {**settings, "params": names}
        for settings, names in zip(saved.param_groups, saved.groups, strict=True)
    ]
    states = {name: saved.state(name) for names in saved.groups for name in names}
    optimizer = {"state": states, "param_groups": groups}
    return whole | {"optimizer_states": [_with_numbers(optimizer)]}


def _with_numbers(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer by the numbers of the parameters instead of their names."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    number = {name: index for index, name in enumerate(names)}
    return {
        "state": {number[name]: state for name, state in optimizer.get("state", {}).items()},
        "param_groups": [
            group | {"params": [number[name] for name in group["params"]]}
            for group in optimizer["param_groups"]
        ],
    }


def load_sharded(
    directory: Path, model: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, Tensor]:
    """Load a directory into a sharded model and its optimizers; every rank must call this.

    Weights that are only in one of both are left alone.

    Returns:
        The weights that were there.
    """
    reader = FileSystemReader(directory)
    saved = reader.read_metadata().state_dict_metadata
    state_dict: dict[str, Any] = get_model_state_dict(model)
    weights = {name: one for name, one in state_dict.items() if f"{_WEIGHTS}.{name}" in saved}
    load({_WEIGHTS: weights}, storage_reader=reader)
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))
    for number, optimizer in enumerate(optimizers):
        state = {f"optimizer_{number}": get_optimizer_state_dict(model, optimizer)}
        load(state, storage_reader=FileSystemReader(directory))
        set_optimizer_state_dict(model, optimizer, state[f"optimizer_{number}"])
    return weights


def load_whole(
    checkpoint: Mapping[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Load a checkpoint that is not sharded into a sharded model and its optimizers.

    Without optimizers their states are left out.
    """
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, checkpoint[_WEIGHTS], options=options)
    states = checkpoint.get("optimizer_states", [])
    for optimizer, state in zip(optimizers, states, strict=bool(states and optimizers)):
        set_optimizer_state_dict(
            model, optimizer, _with_names(state, model, optimizer), options=options
        )


def _with_names(state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer by the names of the parameters instead of their numbers."""
    name_of = {one: name for name, one in model.named_parameters()}
    names = [name_of[one] for group in optimizer.param_groups for one in group["params"]]
    return {
        "state": {names[number]: values for number, values in state["state"].items()},
        "param_groups": [
            group | {"params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }
