"""The policy's weights on their way to an inference server: by the names on disk, one at a time.

Gathers a sharded policy tensor by tensor and merges an adapter on the fly. Never changes the
policy and never talks to a server.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

NamedTensor = tuple[str, Tensor]
Deltas = dict[str, Callable[[], Tensor]]
WeightSync = Literal["auto", "full", "adapter"]


def sends_adapter(model: Any, weight_sync: WeightSync) -> bool:
    """Whether the adapter is all that ever changes, and is sent alone.

    Raises:
        ValueError: it should be and is not.
    """
    config = getattr(model, "peft_config", None)
    fits = config is not None and not config["default"].modules_to_save
    if weight_sync == "adapter" and not fits:
        raise ValueError(
            "weight_sync: adapter needs model.policy.lora without modules_to_save (inference "
            "takes nothing else in an adapter). Set model.engine.init_args.weight_sync to full."
        )
    return fits and weight_sync != "full"


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
    base = _base(model)
    weights, deltas = base.state_dict(keep_vars=True), {}
    if base is not model:
        weights, deltas = _without_adapter(weights), _deltas(base, model.active_adapter)
    weights = _untied(base, weights, deltas)
    for names in _converted_together(base, weights):
        # Nothing here keeps a gathered tensor while the next is gathered.
        converted = revert_weight_conversion(
            base, {name: _gather(weights[name], deltas.get(name)) for name in names}
        )
        while converted:
            yield converted.popitem()


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
                _write_configs(_base(model), folder, dtype, names)


def save_adapter(model: Any, directory: str | Path, *, is_writer: bool) -> None:
    """Write the LoRA adapter alone, as ``peft`` and inference servers load it.

    Every rank has to call it; ``directory`` and ``is_writer`` are as in ``save_weights``.

    Raises:
        ValueError: the adapter has layers that are trained in full.
    """
    from peft import get_peft_model_state_dict

    config = copy.deepcopy(model.peft_config[model.active_adapter])
    if config.modules_to_save:
        raise ValueError(
            "an adapter on its way to an inference server must be low-rank updates only, got "
            f"modules_to_save={config.modules_to_save} (a server would sample without them). Set "
            "model.policy.lora.modules_to_save to null, or let the engine send merged weights."
        )
    config.inference_mode = True
    # Embeddings count as adapted only where LoRA is put on them; to find out whether they were
    # resized peft would ask the Hub.
    adapter = get_peft_model_state_dict(model, save_embedding_layers=False)
    with _to_the_end((name, _gather(tensor)) for name, tensor in adapter.items()) as weights:
        if is_writer:
            with _replacing(Path(directory)) as folder:
                on_cpu = dict(map(partial(_on_cpu, dtype=None), weights))
                save_file(on_cpu, folder / "adapter_model.safetensors", metadata={"format": "pt"})
                config.save_pretrained(str(folder))


def _base(model: Any) -> PreTrainedModel:
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
        raise ValueError(
            f"weights of {type(base).__name__} cannot be sent: their names in a checkpoint must "
            f"follow from each alone, got {sorted({*streamed} ^ {*whole})[:4]} that follow from "
            "the whole model (a server would load wrong weights). Set model.engine to HFEngine, "
            "or model.policy.lora and let the engine send the adapter alone."
        )


@torch.no_grad()
def _gather(weight: Tensor, delta: Callable[[], Tensor] | None = None) -> Tensor:
    """The whole tensor; a delta is added shard by shard, and rounded as the weight is."""
    weight = weight.detach()
    if delta is not None:
        weight = (weight + delta()).to(weight.dtype)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


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


def _on_cpu(weight: NamedTensor, dtype: torch.dtype | None) -> NamedTensor:
    name, tensor = weight
    return name, tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous()


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
