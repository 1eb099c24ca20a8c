"""Read the sizes that memory and time depend on from a model on the meta device.

Parameters, weights and the optimizer's state are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_grpo.rollout.hf.blocked_weights import is_large_linear

UNKNOWN_STATES = 2
"""Values per trained parameter of an optimizer that does not run without values: as for Adam."""
STATE_BYTES_8BIT = 2
"""Bytes per trained parameter of an 8-bit AdamW: two moments of a byte. Its scales, of which there
is one for 256 or 2048 values, are left out."""


def size_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum({id(one): _num_bytes(one) for one in tensors}.values())


def _num_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, or of those that it is made of, as an 8-bit one of torchao."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_num_bytes(getattr(tensor, name)) for name in names)
    return int(tensor.numel() * tensor.element_size())


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; tied ones are counted once."""
    return size_of([*model.parameters(), *model.buffers()])


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def gradient_bytes(model: nn.Module) -> int:
    return size_of(trained(model))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSizes:
    """Memory an optimizer keeps, and extra memory during a step."""

    state_bytes: int
    copies: bool
    """Whether a step on a GPU makes a copy of all trained parameters, as AdamW does unless fused:
    the square roots of all second moments exist at the same time."""
    step_bytes: int = 0
    """Bytes that exist only during a step, of an optimizer that tells them."""


def build_optimizer(
    model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
) -> Optimizer | None:
    """Return an optimizer of a model on the meta device; None if it needs values to be made."""
    try:
        return make_optimizer(trained(model))
    except (RuntimeError, NotImplementedError):
        return None


def optimizer_sizes(model: nn.Module, optimizer: Optimizer | None) -> OptimizerSizes:
    """Return the sizes of an optimizer, from a step on the meta device.

    The model must be on that device. An optimizer that reads values there is taken for Adam, or for
    an 8-bit AdamW if the name of its class suggests that.

    Args:
        optimizer: Result of `build_optimizer`.
    """
    parameters = trained(model)
    size = UNKNOWN_STATES * size_of(parameters)
    if "8bit" in type(optimizer).__name__.lower():
        size = STATE_BYTES_8BIT * sum(one.numel() for one in parameters)
    if optimizer is not None:
        size = _state_bytes(optimizer, parameters, otherwise=size)
    settings = getattr(optimizer, "defaults", {})
    is_fused = settings.get("fused") or settings.get("foreach") is False
    return OptimizerSizes(
        state_bytes=size,
        copies="foreach" in settings and not is_fused,
        step_bytes=getattr(optimizer, "step_bytes", 0),
    )


def _state_bytes(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, otherwise: int
) -> int:
    """Return the bytes of the state after a step, or something else if it reads values.

    The step is taken on one of the parameters that are alike, as all steps take long on the meta
    device.
    """
    alike = _alike(optimizer)
    try:
        for first, *_ in alike:
            first.grad = torch.empty_like(first)
        with torch.compiler.set_stance("force_eager"):  # some compile their step, without values
            optimizer.step()
        return sum(len(same) * _tensor_bytes(optimizer.state[same[0]]) for same in alike)
    except (RuntimeError, NotImplementedError):
        return otherwise
    finally:
        for one in parameters:
            one.grad = None


def _alike(optimizer: Optimizer) -> list[list[nn.Parameter]]:
    """Return the parameters in lists of those that have one shape, type and group."""
    found: dict[Any, list[nn.Parameter]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for one in group["params"]:
            found.setdefault((number, one.shape, one.dtype), []).append(one)
    return [*found.values()]


def _tensor_bytes(state: Mapping[str, Any]) -> int:
    return size_of([value for value in state.values() if isinstance(value, Tensor)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a causal language model, with or without an adapter."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    query_values: int
    """Values of the queries of a layer, per token."""
    kv_values: int
    """Keys and values of all layers, per token."""
    query_groups: int
    """Query heads that share a key head."""
    linear_values: int
    """Inputs and outputs of all linear layers of the body, per token; of an adapter its rank."""
    adapted_values: int
    """Inputs of the linear layers that have an adapter, per token."""
    inner_values: int
    """Values between the two halves of all feed-forward parts, per token."""
    parameters: int
    """Parameters of the whole model, tied ones counted once."""
    trained_parameters: int
    layer_parameters: int
    """Parameters of the largest layer."""
    linear_parameters: int
    """Parameters of all matrices that each token of the body is multiplied by."""
    largest_tensor: int
    """Parameters of the largest tensor."""
    large_linear_parameters: int
    """Weights of the linear layers of which a CPU samples with a copy, the head's included."""
    parameter_bytes: float
    """Bytes per parameter of the model as it is loaded, on average."""
    trained_bytes: float
    """The same for the trained parameters; 0 if there are none."""
    buffer_bytes: int
    has_adapter: bool
    caps_scores: bool = False
    """Whether attention soft-caps its scores, which no kernel of torch does."""

    @property
    def layer_values(self) -> int:
        """Values per token that autograd keeps of one layer, without attention's keys and values.

        It keeps the inputs of linear layers, and most of their outputs as inputs of what follows;
        the inputs that several layers share make up for norms and residuals. Of the feed-forward
        part it keeps the input and the output of the activation function.
        """
        return (self.linear_values + self.inner_values - self.kv_values) // self.num_layers

    @property
    def outer_parameters(self) -> int:
        """Parameters outside of the layers: embeddings, head and last norm."""
        return max(0, self.parameters - self.num_layers * self.layer_parameters)

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def read_parameters(self) -> int:
        """Parameters that a pass reads: all but embeddings of which it looks up a few rows."""
        return self.parameters - max(0, self.outer_parameters - self.head_parameters)

    @property
    def trains_head(self) -> bool:
        return self.trained_parameters == self.parameters


def sizes_of(model: nn.Module) -> ModelSizes:
    """Return the sizes of a causal model of ``transformers``, with or without an adapter."""
    untyped: Any = model
    base: Any = untyped.get_base_model() if hasattr(model, "get_base_model") else untyped
    config: Any = base.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    body = base.get_decoder()
    named = [(name, one) for name, one in body.named_modules() if isinstance(one, nn.Linear)]
    downs = [one for name, one in named if ".lora_A." in name]
    matrices = [one for name, one in named if ".lora_" not in name]
    parameters, own = list(model.parameters()), trained(model)
    total, num_trained = _count(parameters), _count(own)
    return ModelSizes(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_heads=heads,
        query_values=heads * head_size,
        kv_values=2 * config.num_hidden_layers * kv_heads * head_size,
        query_groups=heads // kv_heads,
        linear_values=sum(one.in_features + one.out_features for one in matrices)
        + sum(one.out_features for one in downs),
        adapted_values=sum(one.in_features for one in downs),
        inner_values=sum(one.in_features for one in matrices if _is_inner(one, config.hidden_size)),
        parameters=total,
        trained_parameters=num_trained,
        layer_parameters=max(_count(list(layer.parameters())) for layer in _layers(body)),
        linear_parameters=sum(one.weight.numel() for one in matrices),
        largest_tensor=max(one.numel() for one in parameters),
        large_linear_parameters=sum(
            one.weight.numel() for one in model.modules() if is_large_linear(one)
        ),
        parameter_bytes=size_of(parameters) / total,
        trained_bytes=size_of(own) / num_trained if num_trained else 0.0,
        buffer_bytes=size_of(list(model.buffers())),
        has_adapter=base is not model,
        caps_scores=getattr(config, "attn_logit_softcapping", None) is not None,
    )


def _count(parameters: Sequence[nn.Parameter]) -> int:
    return sum(one.numel() for one in parameters)


def _layers(body: nn.Module) -> list[nn.Module]:
    """Return the layers of the body: the longest of its lists of modules."""
    lists = [list(one) for one in body.modules() if isinstance(one, nn.ModuleList)]
    return max(lists, key=len, default=[body])


def _is_inner(matrix: nn.Linear, hidden_size: int) -> bool:
    """Return whether a matrix is the second half of a feed-forward part."""
    return matrix.out_features == hidden_size and matrix.in_features > hidden_size
