"""How many bytes a training needs: pure functions of a model on the meta device and of sizes.

Weights, gradients and the optimizer's state are exact. Activations, masks and logits follow from
what autograd keeps of a transformer's layer, and are estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_grpo.policy.logprobs import CHUNK_LOGITS

FLOAT32 = 4
LOGIT_COPIES = 4
"""Logits in float32, log-probabilities, their exponentials and a gradient."""
UNKNOWN_STATES = 2
"""Values per trained parameter of an optimizer that does not run without values: as for Adam."""


def size_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum({id(one): one.numel() * one.element_size() for one in tensors}.values())


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; tied ones are counted once."""
    return size_of([*model.parameters(), *model.buffers()])


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def gradient_bytes(model: nn.Module) -> int:
    return size_of(trained(model))


def optimizer_bytes(
    model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
) -> int:
    """Return the bytes of the optimizer's state, from a step on the meta device.

    The model must be on that device. An optimizer that reads values there is taken for Adam.
    """
    parameters = trained(model)
    try:
        optimizer = make_optimizer(parameters)
        for one in parameters:
            one.grad = torch.empty_like(one)
        optimizer.step()
    except (RuntimeError, NotImplementedError):
        return UNKNOWN_STATES * size_of(parameters)
    finally:
        for one in parameters:
            one.grad = None
    states = [value for state in optimizer.state.values() for value in state.values()]
    return size_of([one for one in states if isinstance(one, Tensor)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The sizes of a model that its activations depend on."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    linear_values: int
    """Inputs and outputs of all linear layers of the body, per token."""
    kv_values: int
    """Keys and values of all layers, per token."""
    query_groups: int
    """Query heads that share a key head."""
    caps_scores: bool
    """Whether attention soft-caps its scores, which no kernel of torch does."""

    @property
    def layer_values(self) -> int:
        """Values per token that autograd keeps of one layer.

        It keeps the inputs of linear layers, and most of their outputs as inputs of what follows;
        the inputs that several layers share make up for norms and residuals.
        """
        return self.linear_values // self.num_layers


def sizes_of(model: nn.Module) -> Transformer:
    """Return the sizes of a causal model of ``transformers``, with or without an adapter."""
    untyped: Any = model
    base: Any = untyped.get_base_model() if hasattr(model, "get_base_model") else untyped
    config: Any = base.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    linear = [one for one in base.get_decoder().modules() if isinstance(one, nn.Linear)]
    return Transformer(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        linear_values=sum(one.in_features + one.out_features for one in linear),
        kv_values=2 * config.num_hidden_layers * kv_heads * head_size,
        query_groups=heads // kv_heads,
        caps_scores=getattr(config, "attn_logit_softcapping", None) is not None,
    )


def activation_bytes(
    sizes: Transformer, num_tokens: int, value_bytes: float, *, checkpointing: bool
) -> int:
    """Return the bytes of a micro-batch's activations at the peak of its backward pass.

    Args:
        value_bytes: Of one value: 4 in float32, 2 in bfloat16, about 3 with both.
        checkpointing: Only the input of each layer is kept, and one layer at a time recomputed.
    """
    layer = sizes.layer_values * num_tokens * value_bytes
    kept = sizes.hidden_size * num_tokens * value_bytes if checkpointing else layer
    return round(sizes.num_layers * kept + layer)


def mask_bytes(
    sizes: Transformer,
    num_rows: int,
    completion_tokens: int,
    row_tokens: int,
    value_bytes: float,
) -> int:
    """Return the bytes of the attention mask of a micro-batch: queries x keys of each row.

    Query heads that share a key head are further queries. It is one mask for all layers.
    """
    mask = num_rows * completion_tokens * row_tokens * sizes.query_groups
    return round(mask * value_bytes)


def copy_bytes(
    sizes: Transformer, num_rows: int, row_tokens: int, value_bytes: float, *, checkpointing: bool
) -> int:
    """Return the bytes of the keys and values of the prompt and completion, copied for each row.

    Args:
        checkpointing: They are kept for one layer at a time.
    """
    copies = cache_bytes(sizes, num_rows, row_tokens, value_bytes)
    return copies // sizes.num_layers if checkpointing else copies


def logit_bytes(num_tokens: int, vocab_size: int) -> int:
    """Return the bytes of the logits that exist at a time, which the head computes in chunks."""
    return LOGIT_COPIES * FLOAT32 * min(num_tokens * vocab_size, max(CHUNK_LOGITS, vocab_size))


def cache_bytes(sizes: Transformer, num_rows: int, row_tokens: int, value_bytes: float) -> int:
    """Return the bytes of the keys and values of rows that are sampled together."""
    return round(sizes.kv_values * num_rows * row_tokens * value_bytes)
