"""The weights in safetensors files, as those of a model, read one after the other.

`transformers` renames weights as it loads a whole model, and merges some: files have the experts of
a layer one by one, and the model has them in one tensor. Here its conversions are applied to the
weights of one tensor at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from lit_grpo.policy.named_weights import base_weights

CANNOT_CONVERT = (RuntimeError, ValueError, LookupError)
"""What conversions raise when files do not have what they expect."""


@dataclass(frozen=True)
class Conversion:
    """Weights of files that become weights of the model together.

    Args:
        target: Name of the first weight of the model.
        converter: Of `transformers`.
        patterns: Name in the files -> the converter's pattern, in the order of merging.
    """

    target: str
    converter: WeightConverter
    patterns: dict[str, str] = field(default_factory=dict)

    def apply(self, model: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the weights of the model, by name.

        Args:
            read: Returns a tensor of the files.
        """
        converter: Any = copy.deepcopy(self.converter)
        for name, pattern in self.patterns.items():
            converter.add_tensor(self.target, name, pattern, read(name))
        converted = converter.convert(self.target, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in converted.items()}


@dataclass(frozen=True)
class SavedWeights:
    """Files that have all weights of a model.

    Args:
        directory: Where they are.
        names: Name in the model -> name in the files, of weights that are the same in both.
        conversions: The other weights.
        transforms: Those of `transformers` that apply to the files.
    """

    directory: Path
    names: Mapping[str, str]
    conversions: Sequence[Conversion]
    transforms: Sequence[Any]

    def converted(
        self, model: PreTrainedModel, files: Mapping[str, Any]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that are not the same in the files, whole.

        Args:
            files: Name -> open file, as from `opened`.
        """
        for conversion in self.conversions:
            yield from conversion.apply(model, lambda name: files[name].get_tensor(name)).items()

    @contextmanager
    def opened(self) -> Iterator[dict[str, Any]]:
        """Open the files; provide, by the name of a weight, the one that has it."""
        with ExitStack() as stack:
            found: dict[str, Any] = {}
            for path in sorted(self.directory.glob("*.safetensors")):
                file = stack.enter_context(safe_open(path, framework="pt"))
                found |= dict.fromkeys(file.keys(), file)
            yield found


def find_weights(directory: Path, model: PreTrainedModel) -> SavedWeights | None:
    """Find the weights of a model in a directory's files, of which only the headers are read.

    Args:
        model: It may be on the meta device.

    Returns:
        None if the files lack some, or have them in other shapes or quantized.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return None
    metadata = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    shapes = {name: one.size for name, one in metadata.items() if hasattr(one, "size")}
    needed = base_weights(model)
    transforms = get_model_conversion_mapping(model)
    names, conversions = _sources(shapes, model, needed, transforms)
    found = {name: shapes[source] for name, source in names.items()}
    used = []
    try:
        for conversion in conversions:
            targets = conversion.apply(model, lambda name: torch.empty(shapes[name], device="meta"))
            if not needed.keys().isdisjoint(targets):  # others belong to parts that are not trained
                used.append(conversion)
                found |= {name: one.shape for name, one in targets.items()}
    except CANNOT_CONVERT:
        return None
    if any(found.get(name) != one.shape for name, one in needed.items()):
        return None
    names = {name: source for name, source in names.items() if name in needed}
    applied = [one for one in transforms if getattr(one, "was_used", lambda: True)()]
    return SavedWeights(directory, names, used, applied)


def _sources(
    saved: Mapping[str, Any],
    model: PreTrainedModel,
    needed: Mapping[str, Tensor],
    transforms: Sequence[Any],
) -> tuple[dict[str, str], list[Conversion]]:
    """Return what `transformers` makes of the names in files, as `SavedWeights` has it."""
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    names: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    for source in sorted(saved, key=dot_natural_key):
        target, pattern = rename_source_key(
            source, renamings, converters, model.base_model_prefix, dict(needed)
        )
        if target not in needed and source in needed:
            target, pattern = source, None
        if pattern is None:
            names[target] = source
        else:
            conversion = Conversion(target, by_pattern[pattern])
            conversions.setdefault(target, conversion).patterns[source] = pattern
    return names, list(conversions.values())
