"""Write a model, or only its adapter, tensor by tensor as a Hugging Face directory.

The model is not changed, and no second copy of it is made. A sharded one is gathered on the way.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.peft_utils import ADAPTER_SAFE_WEIGHTS_NAME

from lit_grpo.policy.named_weights import NamedTensor, gather, named_weights, unwrap_peft
from lit_grpo.types import UserError
from lit_grpo.types.atomic import replacing

SHARD_BYTES = 2 * 2**30
"""Largest size of a file, unless a single tensor is larger; also about the host memory that a save
takes: `transformers` would write files of 50 GB."""


def file_bytes(total: int, largest: int, shard_bytes: int = SHARD_BYTES) -> int:
    """Return the size of a model's largest file, from the sizes of all weights and the largest."""
    return min(total, max(shard_bytes, largest))


def save_model(
    model: Any, directory: str | Path, *, is_writer: bool = True, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write what ``save_pretrained`` of the model with its adapter merged would write.

    Other files of the directory stay. If the model is sharded, every rank must call it. The
    arguments are as in ``save_weights``.
    """
    with _exhausting(named_weights(model)) as weights:
        if is_writer:
            folder = Path(directory)
            folder.mkdir(parents=True, exist_ok=True)
            _write(weights, unwrap_peft(model), folder, None, shard_bytes)


def save_weights(
    model: Any,
    directory: str | Path,
    *,
    dtype: torch.dtype | None,
    is_writer: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that ``AutoModelForCausalLM`` and inference servers can load.

    Every rank must call it. A complete new directory replaces an existing one at once. It is for
    servers, which read it soon: nothing waits until it is on the disk.

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
            with replacing(Path(directory), is_durable=False) as folder:
                _write(weights, unwrap_peft(model), folder, dtype, shard_bytes)


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
    adapter = get_peft_model_state_dict(
        model, state_dict=model.state_dict(keep_vars=True), save_embedding_layers=False
    )
    with _exhausting((name, gather(tensor)) for name, tensor in adapter.items()) as weights:
        if is_writer:
            with replacing(Path(directory), is_durable=False) as folder:
                on_cpu = dict(map(partial(_on_cpu, dtype=None), weights))
                _save_file(on_cpu, folder / ADAPTER_SAFE_WEIGHTS_NAME)
                config.save_pretrained(str(folder))


@contextmanager
def _exhausting(weights: Iterator[NamedTensor]) -> Iterator[Iterator[NamedTensor]]:
    """Gather the remaining weights at the end, even after an error: other ranks wait for it."""
    try:
        yield weights
    finally:
        deque(weights, maxlen=0)


def _on_cpu(weight: NamedTensor, dtype: torch.dtype | None, *, copy: bool = False) -> NamedTensor:
    name, tensor = weight
    dtype = dtype if tensor.is_floating_point() else None
    return name, tensor.to("cpu", dtype, copy=copy).contiguous()


def _write(
    weights: Iterator[NamedTensor],
    base: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> None:
    on_cpu = map(partial(_on_cpu, dtype=dtype), weights)
    names = _write_shards(on_cpu, folder, shard_bytes)
    _write_configs(base, folder, dtype, names)


def _write_shards(weights: Iterator[NamedTensor], folder: Path, shard_bytes: int) -> set[str]:
    """Write the weights, replacing earlier ones, with an index if there are several files.

    Returns:
        The names of the weights.
    """
    shards, total_size, num_parameters = [], 0, 0
    for number, shard in enumerate(_shards(weights, shard_bytes)):
        _save_file(shard, _unfinished(folder, number))
        shards.append(list(shard))
        total_size += _size(shard)
        num_parameters += sum(tensor.numel() for tensor in shard.values())
    for old in folder.glob("model*.safetensors*"):  # a loader would prefer one without an index
        old.unlink()
    if len(shards) == 1:
        os.replace(_unfinished(folder, 0), folder / SAFE_WEIGHTS_NAME)
        return set(shards[0])
    file_of: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        os.replace(_unfinished(folder, number), folder / file)
        file_of |= dict.fromkeys(names, file)
    metadata = {"total_parameters": num_parameters, "total_size": total_size}
    index = {"metadata": metadata, "weight_map": file_of}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text)
    return set(file_of)


def _save_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file of weights.

    Raises:
        OSError: that fails, for instance on a full disk, which safetensors only says in words.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error
    make_readable(path)


def make_readable(path: Path) -> None:
    """Give a file its directory's permissions; safetensors writes for its owner alone."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def _unfinished(folder: Path, number: int) -> Path:
    return folder / f"{number}.partial"


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
    if base.is_remote_code():
        untyped: Any = config  # it is annotated as a dict only
        custom_object_save(base, folder, config=untyped)
    config.save_pretrained(folder)
    if base.can_generate():
        base.generation_config.save_pretrained(folder)
