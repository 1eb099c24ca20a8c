"""The model and tokenizer directories that an engine is started with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lit_grpo.policy.files.model_files import save_weights
from lit_grpo.rollout.engine import SampledPolicy


def base_model(policy: SampledPolicy, directory: Path, *, is_writer: bool = True) -> str:
    """Return the directory or hub id of the model that an engine starts with.

    It is the policy, or the base of its adapter. Weights that are stored nowhere are written to the
    directory. Every rank must call this.
    """
    if policy.source is not None:
        return policy.source
    with _without_adapter(policy.model):
        save_weights(policy.model, directory, dtype=None, is_writer=is_writer)
    return str(directory)


def save_tokenizer(policy: SampledPolicy, directory: Path) -> str:
    """Write the policy's tokenizer, which may differ from the one next to its weights."""
    policy.tokenizer.save_pretrained(str(directory))
    policy.model.config.save_pretrained(str(directory))
    return str(directory)


def adapter_rank(model: Any) -> int:
    """Return the rank of the model's adapter."""
    return int(model.peft_config["default"].r)


def adapted_layers(model: Any) -> tuple[str, ...]:
    """Return the names of the layers that have an adapter."""
    from peft.tuners.lora import LoraLayer

    paths = [path for path, layer in model.named_modules() if isinstance(layer, LoraLayer)]
    return tuple(sorted({path.rpartition(".")[2] for path in paths}))


def _without_adapter(model: Any) -> AbstractContextManager[None]:
    """Scale the adapter to zero in this context: it is sent separately."""
    if not hasattr(model, "peft_config"):
        return nullcontext()
    from peft.helpers import rescale_adapter_scale

    return rescale_adapter_scale(model, 0.0)
