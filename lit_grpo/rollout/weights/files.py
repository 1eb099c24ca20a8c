"""The policy's weights on their way to inference servers: in files, or in this process's memory.

Never changes the policy and never talks to a server.
"""

from __future__ import annotations

import copy
import json
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from lit_grpo.rollout.weights.named import NamedTensor, gather, named_weights, without_peft
from lit_grpo.types import UserError

WeightSync = Literal["auto", "full", "adapter"]


def sends_adapter(model: Any, weight_sync: WeightSync) -> bool:
    """Whether the adapter is all that ever changes, and is sent alone.

    Raises:
        ValueError: it should be and is not.
    """
    config = getattr(model, "peft_config", None)
    fits = config is not None and not config["default"].modules_to_save
    if weight_sync == "adapter" and not fits:
        raise UserError(
            "weight_sync: adapter needs model.policy.lora without modules_to_save (inference "
            "takes nothing else in an adapter). Set model.engine.init_args.weight_sync to full."
        )
    return fits and weight_sync != "full"


def save_weights(
    model: Any,
    directory: str | Path,
    *,
    dtype: torch.dtype | None,
    is_writer: bool,
    shard_bytes: int = 2 * 2**30,
) -> None:
    """Write a directory that ``AutoModelForCausalLM`` and inference servers load.

    Every rank has to call it; the directory is there, whole, when the writer's call returns, in
    place of one that had its name.

    Args:
        model: As in ``named_weights``.
        directory: Its parent exists.
        dtype: Of the floating tensors in the files; None keeps the model's.
        is_writer: Whether this rank writes; the others only take part in the gathering.
        shard_bytes: The most a file holds, unless a single tensor is larger; also about the
            most memory that this takes.
    """
    with _to_the_end(named_weights(model)) as weights:
        if is_writer:
            with _replacing(Path(directory)) as folder:
                on_cpu = map(partial(_on_cpu, dtype=dtype), weights)
                names = _write_shards(on_cpu, folder, shard_bytes)
                _write_configs(without_peft(model), folder, dtype, names)


def copy_weights(model: Any, *, dtype: torch.dtype | None, is_keeper: bool) -> dict[str, Tensor]:
    """The weights in host memory, which do not change with the model's.

    Every rank has to call it; ``model`` and ``dtype`` are as in ``save_weights``.

    Args:
        is_keeper: Whether this rank gets them; the others only take part in the gathering.
    """
    with _to_the_end(named_weights(model)) as weights:
        return dict(map(partial(_on_cpu, dtype=dtype, copy=True), weights)) if is_keeper else {}


def save_adapter(model: Any, directory: str | Path, *, is_writer: bool) -> None:
    """Write the LoRA adapter alone, as ``peft`` and inference servers load it.

    Every rank has to call it; ``directory`` and ``is_writer`` are as in ``save_weights``.

    Raises:
        ValueError: the adapter has layers that are trained in full.
    """
    from peft import get_peft_model_state_dict

    config = copy.deepcopy(model.peft_config[model.active_adapter])
    if config.modules_to_save:
        raise UserError(
            "an adapter on its way to an inference server must be low-rank updates only, got "
            f"modules_to_save={config.modules_to_save} (a server would sample without them). Set "
            "model.policy.lora.modules_to_save to null, or let the engine send merged weights."
        )
    config.inference_mode = True
    # Embeddings count as adapted only where LoRA is put on them; to find out whether they were
    # resized peft would ask the Hub.
    adapter = get_peft_model_state_dict(model, save_embedding_layers=False)
    with _to_the_end((name, gather(tensor)) for name, tensor in adapter.items()) as weights:
        if is_writer:
            with _replacing(Path(directory)) as folder:
                on_cpu = dict(map(partial(_on_cpu, dtype=None), weights))
                save_file(on_cpu, folder / "adapter_model.safetensors", metadata={"format": "pt"})
                config.save_pretrained(str(folder))


@contextmanager
def _to_the_end(weights: Iterator[NamedTensor]) -> Iterator[Iterator[NamedTensor]]:
    """Gather what is left in the end, after an error too: the other ranks wait for it."""
    try:
        yield weights
    finally:
        deque(weights, maxlen=0)


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """A new folder that takes the directory's place if no error comes."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        folder = Path(scratch, "new")
        folder.mkdir()
        yield folder
        for file in folder.iterdir():  # safetensors' are its owner's alone, a server may be another
            file.chmod(folder.stat().st_mode & 0o666)
        if directory.exists():
            os.replace(directory, Path(scratch, "old"))
        os.replace(folder, directory)


def _on_cpu(weight: NamedTensor, dtype: torch.dtype | None, *, copy: bool = False) -> NamedTensor:
    name, tensor = weight
    dtype = dtype if tensor.is_floating_point() else None
    return name, tensor.to("cpu", dtype, copy=copy).contiguous()


def _write_shards(weights: Iterator[NamedTensor], folder: Path, shard_bytes: int) -> set[str]:
    """Write the weights, and an index if they need several files; returns their names."""
    shards, total_size = [], 0
    for number, shard in enumerate(_shards(weights, shard_bytes)):
        save_file(shard, folder / str(number), metadata={"format": "pt"})
        shards.append(list(shard))
        total_size += _size(shard)
    if len(shards) == 1:
        os.replace(folder / "0", folder / SAFE_WEIGHTS_NAME)
        return set(shards[0])
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        os.replace(folder / str(number), folder / file)
        file_of |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
    return set(file_of)


def _shards(weights: Iterator[NamedTensor], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The weights of a file each, in one dict that is emptied for the next."""
    shard: dict[str, Tensor] = {}
    for name, tensor in weights:
        if shard and _size(shard) + tensor.nbytes > shard_bytes:
            yield shard
            shard.clear()
        shard[name] = tensor
    yield shard


def _size(shard: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in shard.values())


def _write_configs(
    base: PreTrainedModel, folder: Path, dtype: torch.dtype | None, names: set[str]
) -> None:
    config = copy.deepcopy(base.config)
    config.dtype = dtype or base.dtype
    config.architectures = [type(base).__name__.removeprefix("FSDP")]
    if not names.isdisjoint(base.all_tied_weights_keys):  # training has parted twins
        config.tie_word_embeddings = False
    config.save_pretrained(folder)
    if base.can_generate():
        base.generation_config.save_pretrained(folder)
