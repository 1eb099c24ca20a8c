"""Recognise a model that a resumed run reads from its path again, as checkpoints do not have it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, uint8

from lit_grpo.policy.lora import base_of, is_adapter
from lit_grpo.policy.weight_files import safetensors_files
from lit_grpo.types import UserError

SAMPLED_VALUES = 256
"""Values of a row that are compared; three rows of each weight are."""
SAMPLED_BYTES = 4096
NUM_PLACES = 64


@dataclass(frozen=True)
class ModelSource:
    """A path, and what was there when the model was loaded.

    Args:
        path: Directory or hub id.
        digest: Of samples of the weights, or the commit of a hub id; None if it cannot be told.
    """

    path: str
    digest: str | None

    @classmethod
    def of(cls, path: str) -> ModelSource:
        return cls(path, _digest(path))


def refuse_changed(key: str, saved: Mapping[str, Any] | None, own: ModelSource | None) -> None:
    """Check that a checkpoint goes with the model that has been read from the same path.

    A path that the config has changed passes: that is compared with the run's config.

    Args:
        key: The setting that names the path.
        saved: Fields of the run's `ModelSource`; None if the checkpoint has none.

    Raises:
        UserError: the model has changed since the run read it.
    """
    if saved is None or own is None or None in (saved["digest"], own.digest):
        return
    if saved["path"] == own.path and saved["digest"] != own.digest:
        raise UserError(
            f"{key} must have the weights that the run began with, and those of {own.path} have "
            "been replaced since (the checkpoint was trained with the earlier ones, and does not "
            "contain them). Put the earlier model back: a run that trains on keeps what it had as "
            "final.0 beside its final. Or begin a new run from the new one."
        )


def _digest(path: str) -> str | None:
    directory = Path(path)
    if not directory.is_dir():
        config = try_to_load_from_cache(path, "config.json")  # snapshots/COMMIT/config.json
        return Path(config).parent.name if isinstance(config, str) else None
    found = hashlib.sha256()
    if is_adapter(path):
        found.update(str(_digest(base_of(path))).encode())
    for sample in _samples(directory):
        found.update(sample)
    return found.hexdigest()[:32]


def _samples(directory: Path) -> Iterator[bytes]:
    """Yield samples of all weights, equal for any division of the weights into files."""
    files = safetensors_files(directory)
    if not files:  # pickled
        for file in sorted(directory.glob("*.bin")):
            yield from _file_samples(file)
        return
    with ExitStack() as opened:
        file_of: dict[str, Any] = {}
        for file in files:
            weights: Any = opened.enter_context(safe_open(file, framework="pt"))
            file_of |= dict.fromkeys(weights.keys(), weights)
        for name in sorted(file_of):
            weight = file_of[name].get_slice(name)
            shape = weight.get_shape()
            yield json.dumps([name, weight.get_dtype(), shape]).encode()
            if len(shape) < 2:
                yield _bytes(file_of[name].get_tensor(name))
                continue
            for row in sorted({0, shape[0] // 2, max(0, shape[0] - 1)}):
                yield _bytes(weight[row : row + 1])


def _bytes(row: Tensor) -> bytes:
    sampled = row.reshape(-1)
    sampled = sampled[:: max(1, len(sampled) // SAMPLED_VALUES)].contiguous()
    return sampled.view(uint8).numpy().tobytes()


def _file_samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        for place in range(NUM_PLACES):
            file.seek(size * place // NUM_PLACES)
            yield file.read(SAMPLED_BYTES)
