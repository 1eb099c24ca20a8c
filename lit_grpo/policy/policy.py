"""The policy: a causal language model, its tokenizer, its adapter and its frozen reference.

Loads, builds and saves; never samples, never computes a loss.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_grpo.policy.body_and_head import BodyAndHead, check_body_and_head, runs_packs
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.policy.lora import LoRA, add_lora, is_adapter
from lit_grpo.policy.packed_attention import same_attention
from lit_grpo.types import UserError


class Policy(nn.Module):
    """A language model to train.

    Constructing it reads nothing; ``load`` does, so that a config can be checked without network.

    Args:
        path: Directory or hub id of a model; its weights are the start.
        architecture: Config of a model to build with random weights instead, for instance
            ``{model_type: llama, hidden_size: 128, …}``; it reads bytes.
        tokenizer: Directory or hub id of another tokenizer than the model's own.
        dtype: Of the weights; ``bfloat16`` suits a frozen base under LoRA. Small updates vanish
            in bfloat16 weights: for full training keep float32 and set trainer.precision to
            bf16-mixed.
        attn_implementation: As in ``transformers``, for instance ``sdpa`` or
            ``flash_attention_2``.
        gradient_checkpointing: Compute activations again in the backward pass.
        compile: Run the training forward pass through ``torch.compile``.
        lora: Train an adapter instead of the weights.
        merge_lora: Write the final model with the adapter merged, else the adapter alone.
        trust_remote_code: Run the model code that comes with a hub model.

    Raises:
        ValueError: neither or both of ``path`` and ``architecture``.
    """

    def __init__(
        self,
        path: str | None = None,
        architecture: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
        compile: bool = False,
        lora: LoRA | None = None,
        merge_lora: bool = True,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        if (path is None) == (architecture is None):
            raise UserError(
                "a policy needs either a path (weights to start from) or an architecture (random "
                f"weights), got path={path!r} and architecture={architecture!r}. "
                "Set model.policy.path or model.policy.architecture."
            )
        if not merge_lora and (lora is None or path is None or is_adapter(path)):
            raise UserError(
                "merge_lora: false writes the adapter alone, which needs model.policy.lora and, "
                "as its base, a model.policy.path that is itself no adapter."
            )
        self.path = path
        self.architecture = architecture
        self.tokenizer_path = tokenizer
        self.dtype = dtype
        self.attn_implementation = attn_implementation
        self.gradient_checkpointing = gradient_checkpointing
        self.compile_forward = compile
        self.lora = lora
        self.merge_lora = merge_lora
        self.trust_remote_code = trust_remote_code
        self.model: Any = None
        self.reference_model: PreTrainedModel | None = None
        self.reference_adapter: nn.Module | None = None

    @property
    def source(self) -> str | None:
        """Where the weights that it starts from can be read; None where they stand nowhere."""
        return None if self.path is None or is_adapter(self.path) else self.path

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded when first asked for."""
        source = self.tokenizer_path or self.path
        if source is None:
            return byte_tokenizer()
        with _loading("tokenizer", source):
            tokenizer = AutoTokenizer.from_pretrained(
                source, trust_remote_code=self.trust_remote_code
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def load(self, *, with_reference: bool, moving_reference: bool = False) -> None:
        """Bring the weights in, once.

        Args:
            with_reference: Keep what the policy starts as, for the KL term: with LoRA the policy
                itself with its adapter off, else a frozen copy.
            moving_reference: The reference will be refreshed: with LoRA it is an adapter of its
                own.

        Raises:
            ValueError: nothing can be loaded from the path, or the model's head is not understood.
        """
        if self.model is not None:
            return
        model = self._build() if self.path is None else self._load(self.path)
        check_body_and_head(model)
        self._packs = runs_packs(model)
        if with_reference and self.lora is None:
            self.reference_model = copy.deepcopy(model).requires_grad_(False)
        if self.gradient_checkpointing:
            self._checkpoint_layers(model)
        self.model = model if self.lora is None else add_lora(model, self.lora)
        self.model.train()
        if moving_reference and self.lora is not None:
            self.reference_adapter = _frozen_copy(self.trainable_parameters())
        self.causal_model = BodyAndHead(model, packs=self._packs, compile=self.compile_forward)

    def _checkpoint_layers(self, model: PreTrainedModel) -> None:
        settings: dict[str, Any] = {"use_reentrant": False}
        if not self.compile_forward:  # which computes again just what it has traced
            settings["context_fn"] = same_attention(model.get_decoder().config)
        model.gradient_checkpointing_enable(settings)
        model.enable_input_require_grads()

    def _build(self) -> PreTrainedModel:
        assert self.architecture is not None
        tokens = {
            "vocab_size": len(self.tokenizer),
            "pad_token_id": self.tokenizer.pad_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
            "bos_token_id": self.tokenizer.bos_token_id,
        }
        try:
            config = AutoConfig.for_model(**(tokens | self.architecture))
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"no model can be built from {self.architecture}: {error}. Set "
                "model.policy.architecture to the fields of a transformers config, with its "
                "model_type."
            ) from None
        return AutoModelForCausalLM.from_config(
            _without_dropout(config),
            dtype=getattr(torch, self.dtype),
            attn_implementation=self.attn_implementation,
        )

    def _load(self, path: str) -> PreTrainedModel:
        if is_adapter(path):
            return self._load_merged(path)
        with _loading("model", path):
            config = AutoConfig.from_pretrained(path, trust_remote_code=self.trust_remote_code)
            return AutoModelForCausalLM.from_pretrained(
                path,
                config=_without_dropout(config),
                dtype=getattr(torch, self.dtype),
                attn_implementation=self.attn_implementation,
                trust_remote_code=self.trust_remote_code,
            )

    def _load_merged(self, path: str) -> PreTrainedModel:
        """An adapter is merged into its base, so that the reference is what training starts as."""
        from peft import PeftModel

        settings = json.loads((Path(path) / "adapter_config.json").read_text())
        base = self._load(settings["base_model_name_or_path"])
        return PeftModel.from_pretrained(base, path).merge_and_unload()

    @contextmanager
    def reference(self) -> Iterator[BodyAndHead]:
        """The reference as ``logprobs`` wants it."""
        if self.reference_model is not None:
            yield BodyAndHead(self.reference_model, packs=self._packs)
        elif self.reference_adapter is None:
            with self.model.disable_adapter():
                yield self.causal_model
        else:
            with _exchanged(self.trainable_parameters(), self.reference_adapter):
                yield self.causal_model

    @torch.no_grad()
    def refresh_reference(self, mix: float) -> None:
        """Move the reference towards the policy, to ``mix * policy + (1 - mix) * reference``."""
        if self.reference_adapter is not None:
            pairs = zip(self.reference_adapter.buffers(), self.trainable_parameters(), strict=True)
        else:
            assert self.reference_model is not None
            pairs = zip(self.reference_model.parameters(), self.model.parameters(), strict=True)
        for reference, current in pairs:
            reference.lerp_(current, mix)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a directory that ``AutoModelForCausalLM`` loads; training can go on after it."""
        model = self.model
        if self.lora is not None and self.merge_lora:
            model = copy.deepcopy(model).merge_and_unload()
        model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def _frozen_copy(parameters: list[nn.Parameter]) -> nn.Module:
    """Copies as buffers, which checkpoints hold and no optimizer sees."""
    copies = nn.Module()
    for number, parameter in enumerate(parameters):
        copies.register_buffer(str(number), parameter.detach().clone())
    return copies


@contextmanager
def _exchanged(parameters: list[nn.Parameter], others: nn.Module) -> Iterator[None]:
    """The parameters with the values of others, for as long as the context lasts."""

    def exchange() -> None:
        for parameter, other in zip(parameters, others.buffers(), strict=True):
            parameter.data, other.data = other.data, parameter.data

    exchange()
    try:
        yield
    finally:
        exchange()


def _without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Dropout off: with it the ratio of two passes of the same weights would not be 1."""
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "pdrop", "dropout_prob")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


@contextmanager
def _loading(what: str, source: str) -> Iterator[None]:
    """Say which of the many things that `transformers` tried was the user's.

    What can only be a path is not asked of the Hub: offline that takes its client a minute.
    """
    if not Path(source).exists() and (source.count("/") > 1 or source.startswith((".", "~", "/"))):
        raise UserError(
            f"no {what} could be loaded from {source!r}: there is no such directory. "
            "Set model.policy.path to a directory that save_pretrained wrote (lit-grpo sft and "
            "fit write RUN/final) or to a hub id."
        )
    try:
        yield
    except (OSError, ValueError) as error:
        kind = "directory" if Path(source).exists() else "directory here or model on the hub"
        raise UserError(
            f"no {what} could be loaded from {source!r} ({kind}): {error}. "
            "Set model.policy.path to a directory that save_pretrained wrote or to a hub id."
        ) from error
