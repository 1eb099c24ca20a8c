"""Recognise a model that a resumed run reads from its path again, as checkpoints do not have it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import try_to_load_from_cache

from lit_grpo.policy.lora import base_of, is_adapter
from lit_grpo.policy.weight_files import safetensors_files
from lit_grpo.types import UserError

NUM_PLACES, SAMPLED_BYTES = 16, 64
"""Each weight is compared at so many places, and so many bytes at each."""

_SOURCES = "loaded_from"


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


def save_sources(checkpoint: dict[str, Any], sources: Mapping[str, ModelSource]) -> None:
    """Write into a checkpoint what each model is that a resumed run reads again, by its key."""
    checkpoint[_SOURCES] = {key: asdict(source) for key, source in sources.items()}


def refuse_changed(checkpoint: Mapping[str, Any], sources: Mapping[str, ModelSource]) -> None:
    """Check that a checkpoint goes with the models that have been read from the same paths.

    A path that the config has changed passes: that is compared with the run's config. So does a
    model that is not in the checkpoint.

    Args:
        sources: By the setting that names the path.

    Raises:
        UserError: a model has changed since the run read it.
    """
    for key, own in sources.items():
        saved = checkpoint.get(_SOURCES, {}).get(key)
        if saved is None or None in (saved["digest"], own.digest):
            continue
        if saved["path"] == own.path and saved["digest"] != own.digest:
            raise UserError(
                f"{key} must have the weights that the run began with, and those of {own.path} "
                "have been replaced since (the checkpoint was trained with the earlier ones, and "
                "does not contain them). Put the earlier model back: a run that trains on keeps "
                "what it had as final.0 beside its final. Or begin a new run from the new one."
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
    for file in [] if files else sorted(directory.glob("*.bin")):  # pickled
        with file.open("rb") as opened:
            yield _sample(opened, 0, file.stat().st_size)
    sample_of: dict[str, bytes] = {}
    for file in files:
        with file.open("rb") as opened:
            sample_of |= _weight_samples(opened)
    yield from (sample_of[name] for name in sorted(sample_of))


def _weight_samples(opened: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Yield the name and a sample of each weight of a safetensors file.

    The bytes are read as they are, without tensors: the default device may not be the CPU.
    """
    size = int.from_bytes(opened.read(8), "little")
    header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    for name, about in header.items():
        begin, end = about["data_offsets"]
        kind = json.dumps([name, about["dtype"], about["shape"]])
        yield name, kind.encode() + _sample(opened, 8 + size + begin, end - begin)


def _sample(opened: BinaryIO, begin: int, length: int) -> bytes:
    """Return bytes from many places of a part of a file."""
    found = [str(length).encode()]
    for place in range(NUM_PLACES):
        start = length * place // NUM_PLACES
        opened.seek(begin + start)
        found.append(opened.read(min(SAMPLED_BYTES, length - start)))
    return b"".join(found)
