"""Count what the passes of a model compute and move on a rank: operations, bytes, layers.

Everything is for the mean lengths of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from lit_grpo.cli.estimate.memory_formulas import (
    cache_rows,
    num_chunks,
    shares_prompts,
    tokens_of_chunk,
)
from lit_grpo.cli.estimate.setup import FLOAT32, Setup
from lit_grpo.cli.estimate.step import SHARED_FRACTION

VALUE_TOUCHES = 4
"""How often a value that autograd keeps of a layer is read or written in its forward pass: norms,
rotary embeddings, activation functions and residual sums are kernels of their own."""
LOGIT_TOUCHES, LOGIT_TOUCHES_BACKWARD = 8, 6
"""The same for a float32 logit: softmax, entropy, the choice of a token; and their gradients."""
LARGE_TENSOR = 2**25
"""Bytes from which the C library hands memory back to the system (``M_MMAP_THRESHOLD``)."""
SAMPLING_TOUCHES = 10
"""How often a logit is read or written in sampling: softmax, running sum, search, the largest."""
ADAMW_BYTES, FUSED_BYTES = 80, 28
"""Bytes that AdamW moves per float32 parameter: eight kernels, or one that reads weight, gradient
and two moments and writes three of them."""
RECOMPUTED = 0.75
"""Share of a layer's products that checkpointing repeats: nothing after the last value that the
backward pass needs, which is the input of the last product."""
ADAPTED_LAYERS = 3.0
"""Time in which Python issues a layer with an adapter, in layers without one."""
CLIPPING_TOUCHES = 3
"""How often a gradient is read or written in clipping: its norm, its product with the scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The total work of a rank."""

    flops: float = 0.0
    """Operations of products with weights."""
    attention: float = 0.0
    """Operations of attention."""
    bytes: float = 0.0
    """Read from and written to memory."""
    fresh: float = 0.0
    """Bytes of large tensors that are made."""
    layers: float = 0.0
    """Forward passes of a layer that Python has to issue."""
    passes: float = 0.0
    """Forward passes of the model."""
    few_rows: bool = False
    """Whether the products have few rows, as in sampling."""

    def __add__(self, other: Work) -> Work:
        summed = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return replace(self, **summed)

    def __mul__(self, times: float) -> Work:
        return replace(self, **{name: times * getattr(self, name) for name in _SUMMED})


_SUMMED = ("flops", "attention", "bytes", "fresh", "layers", "passes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of one pass over the completions of a rollout step."""

    model: float
    """That the body reads."""
    head: float
    """Whose logits are computed."""
    pairs: float
    """Queries times keys, of all rows."""
    micro_batches: int


def tokens_of(setup: Setup) -> Tokens:
    """Return the tokens of a pass over all completions of a rank."""
    step = setup.step
    prompt, completion = step.mean_prompt_tokens, step.mean_completion_tokens
    rows, prompts, row = step.num_rows, step.num_prompts, prompt + completion
    shares = step.packed and SHARED_FRACTION * prompt >= row
    model = prompts * prompt + rows * completion if shares else rows * row
    # Rows that share a prompt have a mask, with which a kernel computes all pairs.
    pairs = rows * row * row / 2
    if shares:
        pairs = prompts * row * row / 2 + (rows - prompts) * completion * row
    budgeted = prompts * prompt + rows * completion if step.packed else rows * row
    steps = step.optimizer_steps // step.epochs
    parts = 1 if step.budget is None else ceil(budgeted / steps / step.budget)
    head = float(rows * completion)
    return Tokens(model=model, head=head, pairs=pairs, micro_batches=steps * parts)


def weight_traffic(setup: Setup, parameters: float) -> float:
    """Return the bytes that a pass moves to read weights; autocast writes a copy and reads it."""
    stored = parameters * setup.gathered_bytes
    return stored + 2 * 2 * parameters if setup.is_autocast else stored


def issued_layers(setup: Setup) -> float:
    """Return the number of layers of a forward pass, an adapted one counted by its time to launch.

    An adapter of all linear layers has two products, a scale and a sum for each of them.
    """
    return setup.model.num_layers * (ADAPTED_LAYERS if setup.model.has_adapter else 1.0)


def forward_work(setup: Setup) -> Work:
    """Return the work of one forward pass over all completions, without gradients."""
    model, tokens = setup.model, tokens_of(setup)
    attention = 4 * model.query_values * tokens.pairs * model.num_layers
    body = 2 * model.linear_parameters * tokens.model
    head = 2 * model.head_parameters * tokens.head
    values = model.layer_values * model.num_layers * tokens.model
    moved = VALUE_TOUCHES * setup.activation_bytes * values
    logits = LOGIT_TOUCHES * FLOAT32 * model.vocab_size * tokens.head
    weights = weight_traffic(setup, model.read_parameters) * tokens.micro_batches
    return Work(
        flops=body + head,
        attention=attention,
        bytes=moved + logits + weights,
        fresh=large_logits(setup, tokens),
        layers=issued_layers(setup) * tokens.micro_batches,
        passes=tokens.micro_batches,
    )


def large_logits(setup: Setup, tokens: Tokens) -> float:
    """Return the bytes of all logits if a chunk's logits are a large tensor, else 0.

    Their gradient is written in their place.
    """
    per_token = FLOAT32 * setup.model.vocab_size
    together = tokens_of_chunk(round(tokens.head / tokens.micro_batches), setup.model)
    return tokens.head * per_token if together * per_token >= LARGE_TENSOR else 0.0


def update_work(setup: Setup) -> Work:
    """Return the work of an epoch over all completions: forward, backward, optimizer steps.

    The backward pass computes the gradients of inputs and of trained weights. Checkpointing runs
    most of the body once more, and a head with several chunks runs twice.
    """
    model, tokens = setup.model, tokens_of(setup)
    attention = 4 * model.query_values * tokens.pairs * model.num_layers
    body = 2 * model.linear_parameters * tokens.model
    head = 2 * model.head_parameters * tokens.head
    trained = min(1.0, model.trained_parameters / model.parameters)
    per_part = tokens.head / tokens.micro_batches
    again = num_chunks(per_part, model) > 1
    head_passes = 2 + again + model.trains_head
    flops = (2 + trained + RECOMPUTED * setup.checkpointing) * body + head_passes * head
    values = model.layer_values * model.num_layers * tokens.model
    moved = VALUE_TOUCHES * setup.activation_bytes * values * (3 + setup.checkpointing)
    per_logit = LOGIT_TOUCHES * (1 + again) + LOGIT_TOUCHES_BACKWARD
    logits = per_logit * FLOAT32 * model.vocab_size * tokens.head
    # Each micro-batch reads the weights in both passes and adds to the gradients.
    gradients = 3 * model.trained_bytes * model.trained_parameters
    weights = 2 * weight_traffic(setup, model.read_parameters) + gradients
    passes = Work(
        flops=flops,
        attention=(3 + setup.checkpointing) * attention,
        bytes=moved + logits + weights * tokens.micro_batches,
        fresh=(1 + again) * large_logits(setup, tokens),
        layers=(3 + setup.checkpointing) * issued_layers(setup) * tokens.micro_batches,
        passes=3 * tokens.micro_batches,
    )
    return passes + optimizer_work(setup) * (setup.step.optimizer_steps / setup.step.epochs)


def optimizer_work(setup: Setup) -> Work:
    """Return the work of an optimizer step: clipping, and the optimizer on its share."""
    model = setup.model
    trained = model.trained_parameters / setup.share(setup.sharding.optimizer)
    own = model.trained_parameters / setup.share(setup.sharding.gradients)
    moved = ADAMW_BYTES if setup.optimizer.copies else FUSED_BYTES
    clipping = CLIPPING_TOUCHES * model.trained_bytes * own
    return Work(bytes=moved * trained + clipping)


def prefill_work(setup: Setup, ranks_per_copy: float = 1.0) -> Work:
    """Return the work of reading each prompt once.

    Args:
        ranks_per_copy: Ranks whose prompts one copy of the weights reads.
    """
    model, step = setup.model, setup.step
    prompt = step.mean_prompt_tokens
    tokens = ranks_per_copy * step.num_prompts * prompt
    attention = 2 * model.query_values * tokens * prompt * model.num_layers
    values = VALUE_TOUCHES * model.layer_values * model.num_layers * tokens
    return Work(
        flops=2 * model.linear_parameters * tokens,
        attention=attention,
        bytes=values * setup.compute_bytes + weight_traffic(setup, model.read_parameters),
        layers=issued_layers(setup) * waves(setup),
        passes=waves(setup),
    )


def waves(setup: Setup) -> int:
    """Return how many batches of completions the policy samples one after another."""
    return ceil(setup.step.num_rows / cache_rows(setup))


def decode_work(setup: Setup, rows: float, tokens: float, passes: float, *, dtype: float) -> Work:
    """Return the work of sampling: each of some passes reads all weights.

    Args:
        rows: Completions in all.
        tokens: Sampled tokens of a completion.
        passes: Forward passes in all.
        dtype: Bytes of a weight; 0 for the policy's weights, or under autocast its copies, which
            are made once.
    """
    model, step = setup.model, setup.step
    read = (dtype or setup.compute_bytes) * model.kv_values
    context = step.mean_prompt_tokens + tokens / 2
    cached = context
    if shares_prompts(setup):
        cached = step.mean_prompt_tokens / step.group_size + tokens / 2
    own = setup.compute_bytes if setup.is_autocast else setup.gathered_bytes
    weights = (dtype or own) * model.read_parameters
    logits = SAMPLING_TOUCHES * FLOAT32 * model.vocab_size
    values = VALUE_TOUCHES * model.layer_values * model.num_layers * (dtype or setup.compute_bytes)
    per_token = 2 * (model.linear_parameters + model.head_parameters)
    attention = 4 * model.query_values * context * model.num_layers
    return Work(
        flops=rows * tokens * per_token,
        attention=rows * tokens * attention,
        bytes=passes * weights + rows * tokens * (read * cached + logits + values),
        layers=passes * issued_layers(setup),
        passes=passes,
        few_rows=True,
    )
