"""Recognise the models that a run was started from, whose weights checkpoints may leave out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import try_to_load_from_cache

from lit_grpo.policy.files.weight_files import safetensors_files
from lit_grpo.policy.lora import base_of, is_adapter
from lit_grpo.types import UserError
from lit_grpo.types.plain import changed_settings
from lit_grpo.types.saved_state import ALLOW_CHANGES

NUM_PLACES, SAMPLED_BYTES = 16, 64
"""Each weight is compared at so many places, and so many bytes at each."""

OTHER_POLICY = (
    "so it belongs to a different policy. Set the policy as it was in that run (model.policy, in "
    "Python the Policy of the module)."
)

POLICY_PATH = "model.policy.path"
_SOURCES = "loaded_from"


@dataclass(frozen=True)
class ModelSource:
    """A path, and a digest of its content when the model was loaded.

    Args:
        path: Directory or hub id.
        digest: Hash of samples of the weights, or a hub id's commit; None if it cannot be told.
        is_read_again: Whether a resumed run needs its weights, which no checkpoint has.
    """

    path: str
    digest: str | None
    is_read_again: bool = True

    @classmethod
    def of(cls, path: str) -> ModelSource:
        return cls(path, _digest(path))


def save_sources(checkpoint: dict[str, Any], sources: Mapping[str, ModelSource]) -> None:
    """Write into a checkpoint what each model was that the run began with, by its key."""
    checkpoint[_SOURCES] = as_plain(sources)


def as_plain(sources: Mapping[str, ModelSource]) -> dict[str, dict[str, Any]]:
    """Return what each model was, as plain values."""
    return {key: asdict(source) for key, source in sources.items()}


def refuse_changed(
    checkpoint: Mapping[str, Any],
    sources: Mapping[str, ModelSource],
    *,
    may_be_others: bool = False,
) -> None:
    """Check that a checkpoint goes with the models that have been read.

    The same model at another path passes, and so does one that is not in the checkpoint.

    Args:
        sources: By the setting that names the path.
        may_be_others: Whether a path may have been changed to another model's.

    Raises:
        UserError: a model is another one, or has changed since the run read it.
    """
    for key, own in sources.items():
        saved = checkpoint.get(_SOURCES, {}).get(key)
        if saved is None or saved["digest"] in (None, own.digest) or own.digest is None:
            continue
        if saved["path"] != own.path and not may_be_others:
            raise UserError(
                f"{key} must be the model that the run began with, {saved['path']}, got "
                f"{own.path}, which has other weights (it would be a different run from here on). "
                "Set it back, or begin a new run from the other one. To go on with it all the same "
                f"{ALLOW_CHANGES}."
            )
        if saved["path"] == own.path and own.is_read_again:
            raise UserError(
                f"{key} must have the weights that the run began with, and those of {own.path} "
                "have been replaced since (the checkpoint was trained with the earlier ones, and "
                "does not contain them). Put the earlier model back: a run that trains on keeps "
                "what it had as final.0 beside its final. Or begin a new run from the new one."
            )


def refuse_other_start(checkpoint: Mapping[str, Any], path: str | None) -> None:
    """Check that a run that began with random weights does not resume with a model, or vice versa.

    Args:
        path: The path of the policy; None for random weights.

    Raises:
        UserError: it does.
    """
    if _SOURCES not in checkpoint:  # written by an earlier release
        return
    saved = checkpoint[_SOURCES].get(POLICY_PATH)
    if (saved is None) != (path is None):
        began, now = (
            "random weights (architecture)" if one is None else f"the model {one}"
            for one in (saved and saved["path"], path)
        )
        raise UserError(
            f"model.policy must be what the run began with, {began}, got {now} (a reference that "
            "stays would be another one from here on, so it would be a different run). Set it "
            f"back, or begin a new run. To go on with it all the same {ALLOW_CHANGES}."
        )


def refuse_other_settings(
    checkpoint: Mapping[str, Any], weight_settings: Mapping[str, Any]
) -> None:
    """Check that the weights of a checkpoint compute what they did in its run.

    Args:
        weight_settings: The policy's settings for this by their keys, as `Policy.weight_settings`.

    Raises:
        UserError: a setting is another one.
    """
    if changed := changed_settings(checkpoint.get("run_settings", {}), weight_settings):
        raise UserError(
            "the checkpoint was trained with other settings of the policy, with which its weights "
            f"compute something else: {'; '.join(changed)}. Set them as in that run (model.policy, "
            "in Python the Policy)."
        )


def refuse_other_shape(name: str, of_checkpoint: torch.Size, of_policy: torch.Size) -> None:
    """Check that a weight of a checkpoint has the shape that it has in the policy.

    Raises:
        UserError: it has another one.
    """
    if of_checkpoint != of_policy:
        raise UserError(
            f"the checkpoint has {name!r} of shape {tuple(of_checkpoint)}, and the policy "
            f"{tuple(of_policy)}, {OTHER_POLICY}"
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
