"""The policy: a causal language model, its tokenizer, its adapter and its frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.peft_utils import ADAPTER_SAFE_WEIGHTS_NAME

from lit_grpo.policy.argument_checks import (
    check_merging,
    check_reasoning_tags,
    check_start,
    refuse_model,
    refuse_peft_config,
)
from lit_grpo.policy.body_and_head import (
    BodyAndHead,
    check_body_and_head,
    packs_match_padded,
    runs_packs,
)
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.policy.chat_template import end_tokens
from lit_grpo.policy.files.loading import (
    architecture_settings,
    build_model,
    load_model,
    load_tokenizer,
    outline_model,
    pad_with_eos,
)
from lit_grpo.policy.files.model_files import file_bytes, make_readable, save_model
from lit_grpo.policy.files.model_source import ModelSource
from lit_grpo.policy.files.saved_weights import SavedWeights
from lit_grpo.policy.files.shard_loading import (
    copy_shards,
    drop_placeholders,
    load_shards,
    model_of_placeholders,
    warn_of_whole_load,
    weights_to_read_in_parts,
)
from lit_grpo.policy.files.vocabulary import check_special_tokens
from lit_grpo.policy.lora import LoRA, add_lora, is_adapter
from lit_grpo.policy.named_weights import base_weights, gather
from lit_grpo.policy.packed.packed_attention import same_attention
from lit_grpo.policy.reference import frozen_copy, frozen_values, move_towards, swapped
from lit_grpo.policy.sharding import UNSHARDED, Sharding, whole_shape
from lit_grpo.types import UserError
from lit_grpo.types.field_types import check_init
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.paths import at_home
from lit_grpo.types.plain import plain_value


@checks_keywords
class Policy(nn.Module):
    """A language model to train.

    The constructor reads nothing, so a config can be checked without a network; ``load``
    reads the weights.

    Args:
        path: Directory or hub id of the model to start from.
        architecture: Config of a model to build with random weights instead, for example
            ``{model_type: llama, hidden_size: 128, …}``. Unless ``tokenizer`` is set, a byte
            tokenizer is used.
        tokenizer: Directory or hub id of a tokenizer other than the model's own.
        dtype: Data type of the weights. ``bfloat16`` suits a frozen base under LoRA. Trained
            weights lose small updates in bfloat16: keep float32 and set trainer.precision to
            bf16-mixed, or train them with ``MasterAdamW``.
        attn_implementation: Attention implementation of ``transformers``, for example ``sdpa`` or
            ``flash_attention_2``; null leaves the choice to it.
        gradient_checkpointing: Recompute activations in the backward pass to save memory.
        packing: Run the completions of a batch as one row of tokens, in which each prompt appears
            once, where the architecture allows it; false runs them padded, each with its prompt.
        compile: Run the training forward pass through ``torch.compile``.
        lora: Adapter to train instead of the weights.
        merge_lora: Merge the adapter into the final model; false writes only the adapter.
        trust_remote_code: Run the model code that comes with a hub model.
        reasoning_tags: The two tags around the model's reasoning, which rewards with
            ``reasoning: strip`` do not see; null if nothing is reasoning.

    Raises:
        UserError: neither or both of ``path`` and ``architecture`` are set, or a setting is wrong.
    """

    def __init__(
        self,
        path: str | None = None,
        architecture: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
        packing: bool = True,
        compile: bool = False,
        lora: LoRA | None = None,
        merge_lora: bool = True,
        trust_remote_code: bool = False,
        reasoning_tags: tuple[str, str] | None = ("<think>", "</think>"),
    ) -> None:
        refuse_model(path)
        refuse_peft_config(lora)
        check_init("model.policy", Policy, locals())
        super().__init__()
        check_start(path, architecture)
        check_merging(path, lora, merge_lora=merge_lora)
        check_reasoning_tags(reasoning_tags)
        self.path = None if path is None else at_home(path)
        self.architecture = architecture
        self.tokenizer_path = None if tokenizer is None else at_home(tokenizer)
        self.dtype = dtype
        self.attn_implementation = attn_implementation
        self.gradient_checkpointing = gradient_checkpointing
        self.packing = packing
        self.compile_forward = compile
        self.lora = lora
        self.merge_lora = merge_lora
        self.trust_remote_code = trust_remote_code
        self.reasoning_tags = reasoning_tags
        self.loaded_from: ModelSource | None = None
        self.trained_in: Path | None = None  # the directory of the run that has trained it
        self.has_trained = False  # under any trainer
        self.model: Any = None
        self.reference_model: PreTrainedModel | None = None
        self.reference_adapter: nn.Module | None = None
        self.sharding = UNSHARDED

    def weight_settings(self) -> dict[str, Any]:
        """Return the settings that decide what its weights compute, by their keys."""
        sections: dict[str, dict[str, Any]] = {}
        if self.lora is not None:
            sections["lora"] = asdict(self.lora)
        if self.architecture is not None:
            sections["architecture"] = architecture_settings(self.architecture, self.tokenizer)
        return {
            f"model.policy.{section}.{name}": plain_value(value)
            for section, settings in sections.items()
            for name, value in settings.items()
        }

    @property
    def source(self) -> str | None:
        """Where the initial weights can be read; None if no one place holds all of them."""
        return None if self.path is None or is_adapter(self.path) else self.path

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded on first use."""
        source = self.tokenizer_path or self.path
        if source is None:
            return byte_tokenizer()
        key = f"model.policy.{'tokenizer' if self.tokenizer_path else 'path'}"
        tokenizer = load_tokenizer(source, trust_remote_code=self.trust_remote_code, key=key)
        pad_with_eos(tokenizer, source)
        return tokenizer

    def load(
        self,
        *,
        with_reference: bool,
        refreshes_reference: bool = False,
        sharding: Sharding = UNSHARDED,
    ) -> None:
        """Load or build the model; later calls do nothing.

        Args:
            with_reference: Keep the initial policy as the reference of the KL term: with LoRA this
                is the policy with its adapter disabled, otherwise a frozen copy.
            refreshes_reference: The reference will be refreshed; with LoRA it then needs its own
                adapter.
            sharding: How the model and its reference are sharded.

        Raises:
            UserError: the model cannot be loaded, or its head is not supported, or it was loaded
                before without a reference.
        """
        if self.model is not None:
            self._refuse_missing_reference(with_reference, refreshes_reference)
            return
        self.sharding = sharding
        saved = None
        if sharding.loads_parts:
            saved = weights_to_read_in_parts(self.path, self.lora, **self._loading_options)
        model = self._initial_model(load_model if saved is None else model_of_placeholders)
        check_special_tokens(model.config, self.tokenizer)
        if sharding.loads_parts and saved is None and self.path is not None:
            warn_of_whole_load(model)
        self.loaded_from = None if self.path is None else ModelSource.of(self.path)
        use_packing = self.packing and runs_packs(model)
        if with_reference and self.lora is None:
            self.reference_model = frozen_copy(model, has_weights=not sharding.loads_parts)
        if self.gradient_checkpointing:
            self._checkpoint_layers(model)
        self.model = model if self.lora is None else add_lora(model, self.lora)
        self.model.train()
        self._shard(self.model, model, saved)
        if self.reference_model is not None:
            self._shard_reference(self.reference_model)
        check_body_and_head(model, sharding)
        use_packing = use_packing and packs_match_padded(model, sharding)
        if refreshes_reference and self.lora is not None:
            self.reference_adapter = frozen_values(self.trainable_parameters())
        self.body_and_head = BodyAndHead(
            model, use_packing=use_packing, compile=self.compile_forward, sharding=sharding
        )

    def _refuse_missing_reference(self, with_reference: bool, refreshes_reference: bool) -> None:
        """Check that a loaded policy has the reference that a further module needs."""
        if self.lora is None:
            is_missing = with_reference and self.reference_model is None
            kind, absent = "without a KL term", "no reference"
        else:
            is_missing = refreshes_reference and self.reference_adapter is None
            kind, absent = "that refreshes no reference", "none to refresh"
        if is_missing:
            raise UserError(
                f"this policy was loaded by a module {kind}, so it has {absent}, and may have been "
                "trained since. Make a new Policy for each module."
            )

    def _shard(self, model: Any, base: PreTrainedModel, saved: SavedWeights | None) -> None:
        """Shard a model in place, and read its weights if it has none yet.

        Args:
            model: The model, or ``peft`` around it.
            saved: Weights to read; None if it has them.
        """
        if saved is not None:
            drop_placeholders(base)
        self.sharding.shard(base)
        if saved is not None:
            load_shards(model, base, saved, self.sharding.device)

    def _shard_reference(self, reference: PreTrainedModel) -> None:
        """Shard the reference in place, with the weights of the policy, if it has none yet."""
        self.sharding.shard(reference)
        if self.sharding.loads_parts:
            copy_shards(self.model, reference, self.sharding.device)

    def outline(self) -> nn.Module:
        """Return the model that ``load`` would train, on the meta device: shapes without values.

        Raises:
            UserError: the model cannot be loaded or built, or no adapter can be added to it.
        """
        with torch.device("meta"):
            model = self._initial_model(outline_model)
            return model if self.lora is None else add_lora(model, self.lora)

    @property
    def _loading_options(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
        }

    def _initial_model(self, load: Callable[..., PreTrainedModel] = load_model) -> PreTrainedModel:
        if self.path is not None:
            return load(self.path, **self._loading_options)
        assert self.architecture is not None
        return build_model(
            self.architecture,
            self.tokenizer,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
        )

    def _checkpoint_layers(self, model: Any) -> None:
        settings: dict[str, Any] = {"use_reentrant": False}
        if not self.compile_forward:  # a compiled layer recomputes exactly what was traced
            settings["context_fn"] = same_attention(model.get_decoder().config)
        model.gradient_checkpointing_enable(settings)
        model.enable_input_require_grads()

    @contextmanager
    def reference(self) -> Iterator[BodyAndHead]:
        """Provide the reference; under LoRA the policy itself acts as it within the context."""
        if self.reference_model is not None:
            yield BodyAndHead(
                self.reference_model,
                use_packing=self.body_and_head.uses_packing,
                sharding=self.sharding,
            )
        elif self.reference_adapter is None:
            with self.model.disable_adapter():
                yield self.body_and_head
        else:
            with swapped(self.trainable_parameters(), self.reference_adapter):
                yield self.body_and_head

    def refresh_reference(self, mix: float) -> None:
        """Move the reference towards the policy, to ``mix * policy + (1 - mix) * reference``."""
        if self.reference_adapter is not None:
            move_towards(self.trainable_parameters(), self.reference_adapter.buffers(), mix)
        else:
            assert self.reference_model is not None
            move_towards(self.model.parameters(), self.reference_model.parameters(), mix)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def saved_bytes(self) -> tuple[int, int]:
        """Return how much ``save_pretrained`` writes, and about the host memory that it takes."""
        merges = self.lora is not None and self.merge_lora
        writes_adapter = self.lora is not None and not merges
        whole_model = base_weights(self.model).values()
        weights = self.trainable_parameters() if writes_adapter else whole_model
        sizes = [whole_shape(one).numel() * one.element_size() for one in weights]
        total, largest = sum(sizes), max(sizes)
        if not (merges or self.sharding.is_sharded or self.model.device.type != "cpu"):
            return total, 0  # nothing is copied
        # The next tensor is in memory before a file is written.
        copied = total if writes_adapter else file_bytes(total, largest) + largest
        return total, min(total, copied)

    def save_pretrained(self, directory: str | Path, *, is_writer: bool = True) -> None:
        """Write a directory that ``AutoModelForCausalLM`` loads; the policy itself is unchanged.

        A server that loads it ends completions at the tokens at which training ended them.

        Args:
            is_writer: Whether this rank writes. If the policy is sharded, the others must call it,
                too, and only take part in gathering.

        Raises:
            UserError: the weights are not loaded.
        """
        if self.model is None:
            raise UserError(
                "the policy has no weights yet: a run loads them at its start, and "
                "policy.load(with_reference=False) before one."
            )
        if self.sharding.is_sharded or is_writer:
            self._save_weights(directory, is_writer)
        if is_writer:
            self._save_tokenizer(directory)

    def _save_weights(self, directory: str | Path, is_writer: bool) -> None:
        if self.lora is None or self.merge_lora:
            save_model(self.model, directory, is_writer=is_writer)
            return
        named = self.model.named_parameters()
        trained = {name: gather(one) for name, one in named if one.requires_grad}
        if not is_writer:
            return
        if self.path is not None and Path(self.path).exists():  # else an id on the Hub
            config = self.model.peft_config[self.model.active_adapter]
            config.base_model_name_or_path = str(Path(self.path).absolute())
        self.model.save_pretrained(directory, state_dict=trained)
        make_readable(Path(directory) / ADAPTER_SAFE_WEIGHTS_NAME)

    def _save_tokenizer(self, directory: str | Path) -> None:
        """Write the tokenizer, and the tokens that end a completion."""
        self.tokenizer.save_pretrained(directory)
        ends = end_tokens(self.model, self.tokenizer)
        if not ends or not (Path(directory) / GENERATION_CONFIG_NAME).exists():
            return
        saved = GenerationConfig.from_pretrained(directory)
        if len(ends) > 1 or saved.eos_token_id is None:
            saved.eos_token_id = ends
            saved.save_pretrained(directory)


if TYPE_CHECKING:
    PolicyOrPath = Policy | str | PathLike[str]
else:
    PolicyOrPath = Policy  # the parser of a config builds it
"""The policy of a training run; in Python also the path, or the Hub id, of its model."""
