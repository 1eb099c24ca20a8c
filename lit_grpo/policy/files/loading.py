"""Load or build models and tokenizers, with errors that name the setting to change."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch.utilities import rank_zero_only
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_grpo.policy.chat_template import SET_EOS
from lit_grpo.policy.files.attention import explained_attention
from lit_grpo.policy.files.model_types import ABOUT_MODEL_TYPE, explain_model_type
from lit_grpo.policy.files.source_checks import explained_errors, is_hub_id
from lit_grpo.policy.files.vocabulary import check_special_tokens
from lit_grpo.policy.files.weight_files import check_weight_files
from lit_grpo.policy.lora import base_of, is_adapter
from lit_grpo.types import UserError
from lit_grpo.types.spelling import did_you_mean

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
"""Files of which a directory with a tokenizer has at least one."""
READ_AS_OTHERS = {"model_type", "rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Fields that `transformers` keeps under another name, or not at all."""
COMPUTE_NOTHING = {"use_cache", "initializer_range", "pretraining_tp"}
"""Fields of an architecture that do not affect what its weights compute."""
SIMILARITY_OF_MISTYPED = 0.85


def load_tokenizer(
    source: str, *, trust_remote_code: bool, key: str = "model.policy.path"
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a directory or the Hub.

    Args:
        key: The setting that names the source, for errors.
    """
    with explained_errors("tokenizer", source, TOKENIZER_FILES, key):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code
        )
    return tokenizer


def pad_with_eos(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Let a tokenizer without a padding token pad with its end-of-sequence token.

    Raises:
        UserError: it has neither.
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise UserError(
            f"the tokenizer of {source!r} must have an end-of-sequence token, got one with neither "
            "that nor a padding token (a completion could never end, and batches are padded with "
            f"one of the two). To give it one, {SET_EOS}"
        )


def load_model(
    path: str,
    *,
    dtype: str,
    attn_implementation: str | None,
    trust_remote_code: bool,
    key: str = "model.policy.path",
) -> PreTrainedModel:
    """Load a causal model, without dropout, from a directory or the Hub.

    An adapter is merged into its base model, so the reference is what training starts from.

    Args:
        key: The setting that names the path, for errors.
    """
    options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    check_weight_files(path, key)
    if is_adapter(path):
        return _load_merged(path, dtype=dtype, key=key, **options)
    with explained_errors("model", path, ("config.json",), key):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with explained_attention(attn_implementation):
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path, config=_without_dropout(config), dtype=getattr(torch, dtype), **options
            )
    return model


def outline_model(
    path: str,
    *,
    dtype: str,
    attn_implementation: str | None,
    trust_remote_code: bool,
    key: str = "model.policy.path",
) -> PreTrainedModel:
    """Return what `load_model` would load, on the meta device: shapes and data types, no values.

    Only the config is read.
    """
    with torch.device("meta"):
        return model_without_weights(
            _base_of(path, key) if is_adapter(path) else path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            key=key,
        )


def model_without_weights(
    path: str, *, dtype: str, key: str = "model.policy.path", **options: Any
) -> PreTrainedModel:
    """Build the model of a directory or of the Hub by its configs alone."""
    with explained_errors("model", path, ("config.json",), key):
        trust = options["trust_remote_code"]
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        factory: Any = AutoModelForCausalLM  # transformers does not annotate from_config
        with explained_attention(options["attn_implementation"]):
            model: PreTrainedModel = factory.from_config(
                _without_dropout(config), dtype=getattr(torch, dtype), **options
            )
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _base_of(adapter: str, key: str) -> str:
    """Return the model that an adapter was trained on.

    Raises:
        UserError: it was a directory, which is not there.
    """
    base = base_of(adapter)
    if not is_hub_id(base) and not Path(base).exists():
        raise UserError(
            f"the adapter {adapter} needs the model that it was trained on, {base}, and there is "
            "no such directory (base_model_name_or_path of its adapter_config.json). Put the "
            f"model there, write its path into that file, or set {key} to a merged model."
        )
    return base


def _load_merged(path: str, **options: Any) -> PreTrainedModel:
    from peft import PeftModel

    base: Any = load_model(_base_of(path, options["key"]), **options)
    merged: Any = PeftModel.from_pretrained(base, path).merge_and_unload()
    model: PreTrainedModel = merged.requires_grad_()  # peft has frozen the weights of the base
    return model


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return how many tokens a model can read; None if its config has no limit."""
    positions: int | None = getattr(config, "max_position_embeddings", None)
    return positions


def build_model(
    architecture: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str,
    attn_implementation: str | None,
) -> PreTrainedModel:
    """Build a causal model with random weights for the vocabulary of a tokenizer."""
    config = _build_config(architecture, tokenizer)
    _check_keys(architecture, config)
    advice = "Remove vocab_size from model.policy.architecture: it follows the tokenizer."
    check_special_tokens(config, tokenizer, advice)
    factory: Any = AutoModelForCausalLM  # transformers does not annotate from_config
    with explained_attention(attn_implementation):
        model: PreTrainedModel = factory.from_config(
            _without_dropout(config),
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
        )
    return model


def architecture_settings(
    architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the fields that determine what a model of this architecture computes, with defaults.

    These are the fields of its own config, without those that all models have.
    """
    of_all = {*PreTrainedConfig().to_dict()} - {*architecture}
    settings = _without_dropout(_build_config(architecture, tokenizer)).to_dict()
    return {
        name: value
        for name, value in settings.items()
        if name not in of_all | COMPUTE_NOTHING and not name.endswith("_token_id")
    }


def _build_config(
    architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    tokens = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**{**tokens, **architecture})
    except (KeyError, ValueError, TypeError, StrictDataclassError) as error:
        reason = str(error.__cause__ or error).rstrip(".")
        if ABOUT_MODEL_TYPE.search(reason):
            key = "model.policy.architecture"
            reason = explain_model_type(architecture["model_type"], "config", key)
        raise UserError(
            f"no model can be built from {dict(architecture)}: {reason}. Set "
            "model.policy.architecture to the fields of a transformers config, including its "
            "model_type."
        ) from None
    return config


def _check_keys(architecture: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Refuse a mistyped field, and warn of one that the config of such models does not have.

    `transformers` keeps fields of any name.
    """
    usual = AutoConfig.for_model(config.model_type)
    for name in architecture.keys() - READ_AS_OTHERS:
        if hasattr(usual, name):
            continue
        fields = {*usual.to_dict(), *usual.attribute_map}
        meant = did_you_mean(name, fields, similarity=SIMILARITY_OF_MISTYPED)
        what = f"policy.architecture.{name}: {type(config).__name__} has no such field"
        if meant:
            raise UserError(f"{what}.{meant} Set model.policy.architecture.")
        rank_zero_only(log.warning)("%s, so it may change nothing.", what)


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Set every dropout to 0, because with dropout the ratio of equal policies is not 1."""
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "pdrop", "dropout_prob")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config
