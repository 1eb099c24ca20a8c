"""Write the policy's weights, or only its adapter, in the format of inference servers.

The policy is not changed; sending the weights is left to the engines.
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

from lit_grpo.rollout.weights.named import NamedTensor, gather, named_weights, unwrap_peft
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


def save_weights(
    model: Any,
    directory: str | Path,
    *,
    dtype: torch.dtype | None,
    is_writer: bool,
    shard_bytes: int = 2 * 2**30,
) -> None:
    """Write a directory that ``AutoModelForCausalLM`` and inference servers can load.

    Every rank must call it. A complete new directory replaces an existing one at once.

    Args:
        model: As in ``named_weights``.
        directory: Its parent exists.
        dtype: Data type of the floating-point tensors in the files; None keeps the model's.
        is_writer: Whether this rank writes; the others only take part in gathering.
        shard_bytes: Largest size of a file, unless a single tensor is larger; also about the
            host memory that this takes.
    """
    with _exhausting(named_weights(model)) as weights:
        if is_writer:
            with _replacing(Path(directory)) as folder:
                on_cpu = map(partial(_on_cpu, dtype=dtype), weights)
                names = _write_shards(on_cpu, folder, shard_bytes)
                _write_configs(unwrap_peft(model), folder, dtype, names)


def copy_weights(model: Any, *, dtype: torch.dtype | None, is_writer: bool) -> dict[str, Tensor]:
    """Copy the weights to host memory; empty on ranks other than the writer.

    Every rank must call it; the arguments are as in ``save_weights``.
    """
    with _exhausting(named_weights(model)) as weights:
        return dict(map(partial(_on_cpu, dtype=dtype, copy=True), weights)) if is_writer else {}


def save_adapter(model: Any, directory: str | Path, *, is_writer: bool) -> None:
    """Write only the LoRA adapter, in the format of ``peft`` and inference servers.

    Every rank must call it; the arguments are as in ``save_weights``.

    Raises:
        UserError: the adapter has layers that are trained in full.
    """
    from peft import get_peft_model_state_dict

    config = copy.deepcopy(model.peft_config[model.active_adapter])
    if config.modules_to_save:
        raise UserError(
            "an adapter for an inference server must have low-rank updates only, got "
            f"modules_to_save={config.modules_to_save} (the server would ignore those layers). "
            "Set model.policy.lora.modules_to_save to null, or "
            "model.engine.init_args.weight_sync to full."
        )
    config.inference_mode = True
    # With save_embedding_layers peft would ask the Hub whether the embeddings were resized.
    adapter = get_peft_model_state_dict(model, save_embedding_layers=False)
    with _exhausting((name, gather(tensor)) for name, tensor in adapter.items()) as weights:
        if is_writer:
            with _replacing(Path(directory)) as folder:
                on_cpu = dict(map(partial(_on_cpu, dtype=None), weights))
                save_file(on_cpu, folder / "adapter_model.safetensors", metadata={"format": "pt"})
                config.save_pretrained(str(folder))


@contextmanager
def _exhausting(weights: Iterator[NamedTensor]) -> Iterator[Iterator[NamedTensor]]:
    """Gather the remaining weights at the end, even after an error: other ranks wait for it."""
    try:
        yield weights
    finally:
        deque(weights, maxlen=0)


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """Yield a new folder that replaces the directory if no error is raised."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        folder = Path(scratch, "new")
        folder.mkdir()
        yield folder
        for file in folder.iterdir():  # safetensors makes its files readable by their owner only
            file.chmod(folder.stat().st_mode & 0o666)
        if directory.exists():
            os.replace(directory, Path(scratch, "old"))
        os.replace(folder, directory)


def _on_cpu(weight: NamedTensor, dtype: torch.dtype | None, *, copy: bool = False) -> NamedTensor:
    name, tensor = weight
    dtype = dtype if tensor.is_floating_point() else None
    return name, tensor.to("cpu", dtype, copy=copy).contiguous()


def _write_shards(weights: Iterator[NamedTensor], folder: Path, shard_bytes: int) -> set[str]:
    """Write the weights, with an index if there are several files; return their names."""
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
    """Yield the weights of each file, in one dict that is emptied for the next file."""
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
    if not names.isdisjoint(base.all_tied_weights_keys):  # training has untied them
        config.tie_word_embeddings = False
    config.save_pretrained(folder)
    if base.can_generate():
        base.generation_config.save_pretrained(folder)
