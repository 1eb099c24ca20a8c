"""Compute how many bytes a step needs on a rank, from sizes alone; each term has its reason.

Weights, gradients and the optimizer's state are exact. Activations, masks and logits follow from
what autograd keeps of a transformer's layer, and are estimates.
"""

from __future__ import annotations

from math import ceil

from lit_grpo.cli.estimate.model_sizes import ModelSizes
from lit_grpo.cli.estimate.setup import FLOAT32, Setup
from lit_grpo.policy.logprobs import CHUNK_LOGITS
from lit_grpo.rollout.hf.blocked_weights import MIN_TOKENS
from lit_grpo.rollout.hf.running_batch import prompts_at_once
from lit_grpo.rollout.hf.shared_prompts import MIN_SAVED_TOKENS

LOGIT_COPIES, LOGIT_COPIES_CPU = 3.0, 1.0
"""Copies in float32: log-probabilities in the place of the logits, and for the entropy their
exponentials and the finite ones. A CPU makes these for a few tokens at a time."""
LOGIT_COPY_16 = 0.5
"""Further copies where the head computes in bfloat16, whose logits exist first."""
SAMPLING_COPIES = 4
"""Logits of a sampled token, divided by the temperature, probabilities and their running sum."""
SORTING_COPIES = 6
"""Further copies with top-p: sorted probabilities, their places in 64 bits, running sums."""
BACKWARD_GRADIENTS = 1
"""Gradients of a layer's values that exist along with the values, freed one by one: as many
as the feed-forward part has inner values, and the layer inputs."""
PREFILL_VALUES = 3
"""Values of a layer's feed-forward part that exist at a time without autograd."""


def layer_bytes(setup: Setup) -> int:
    """Return the bytes that autograd keeps of one layer for the largest micro-batch.

    Attention in blocks keeps the keys and values of each row, including its prompt.
    """
    step, sizes = setup.step, setup.model
    kv = sizes.kv_values // sizes.num_layers
    kv_tokens = step.micro_batch_tokens
    if not setup.merges_attention:
        kv_tokens = max(kv_tokens, step.micro_batch_rows * step.row_tokens)
    values = sizes.layer_values * step.micro_batch_tokens + kv * kv_tokens
    copies = sizes.adapted_values // sizes.num_layers * step.micro_batch_tokens
    return round(values * setup.activation_bytes + copies * adapter_input_bytes(setup))


def adapter_input_bytes(setup: Setup) -> int:
    """Return the bytes of an adapter's input, in addition to its layer's input.

    `peft` keeps adapters in float32 and casts what they read.
    """
    if not setup.computes_in_weights:
        return 0
    return setup.compute_bytes if setup.precision == "bf16-mixed" else FLOAT32


def kept_bytes(setup: Setup) -> int:
    """Return the bytes of activations that exist from the forward to the backward pass."""
    sizes = setup.model
    if not setup.checkpointing:
        return sizes.num_layers * layer_bytes(setup)
    inputs = sizes.hidden_size * setup.step.micro_batch_tokens
    per_value = FLOAT32 if setup.is_autocast else setup.compute_bytes
    return round(sizes.num_layers * inputs * per_value)


def backward_bytes(setup: Setup) -> int:
    """Return the bytes of a layer's gradients, and of the layer itself if it is recomputed."""
    sizes, tokens = setup.model, setup.step.micro_batch_tokens
    inner = sizes.inner_values // sizes.num_layers
    values = BACKWARD_GRADIENTS * (inner + sizes.hidden_size)
    recomputed = layer_bytes(setup) if setup.checkpointing else 0
    return round(values * tokens * setup.compute_bytes) + recomputed


def mask_bytes(setup: Setup) -> int:
    """Return the bytes of the attention masks of a micro-batch: queries x keys of each row.

    Query heads that share a key head count as extra queries. All layers use the same masks, which
    hold floats; a compiler finds that those of compiled layers are equal, and keeps one of each.
    Layers that are compiled one by one, in stage 3 of DeepSpeed, keep theirs.
    """
    if setup.merges_attention:
        return 0
    step, sizes = setup.step, setup.model
    entries = step.masked_rows * step.completion_tokens * step.row_tokens * sizes.query_groups
    keeps_each = setup.compiles and setup.sharding.is_zero_3 and not setup.checkpointing
    copies = sizes.num_layers if keeps_each else 1
    return round(entries * setup.compute_bytes * copies)


def logit_bytes(setup: Setup) -> int:
    """Return the bytes of the logits that exist at a time, which the head computes in chunks."""
    tokens = setup.step.micro_batch_rows * setup.step.completion_tokens
    copies = LOGIT_COPIES if setup.cluster.is_gpu else LOGIT_COPIES_CPU
    if setup.compute_bytes < FLOAT32:
        copies += LOGIT_COPY_16
    return round(copies * FLOAT32 * tokens_of_chunk(tokens, setup.model) * setup.model.vocab_size)


def tokens_of_chunk(num_tokens: int, sizes: ModelSizes) -> int:
    """Return how many tokens the head computes at a time."""
    return min(num_tokens, max(1, CHUNK_LOGITS // sizes.vocab_size))


def num_chunks(num_tokens: float, sizes: ModelSizes) -> int:
    return max(1, ceil(num_tokens / max(1, CHUNK_LOGITS // sizes.vocab_size)))


def head_gradient_bytes(setup: Setup) -> int:
    """Return the bytes of the head's gradients in addition to the one that is kept.

    Each chunk makes one, and autograd adds them up before it hands the sum on.
    """
    if not setup.model.trains_head:
        return 0
    tokens = setup.step.micro_batch_rows * setup.step.completion_tokens
    copies = min(2, num_chunks(tokens, setup.model))
    return round(copies * setup.model.head_parameters * setup.compute_bytes)


def cast_bytes(setup: Setup) -> int:
    """Return the bytes of the bfloat16 copies of trained weights that autograd keeps."""
    if not setup.is_autocast:
        return 0
    copies = 2 * setup.model.trained_parameters
    return copies // setup.model.num_layers if setup.checkpointing else copies


def sampling_cast_bytes(setup: Setup) -> int:
    """Return the bytes of the bfloat16 copies that the policy samples with, for all tokens."""
    return 2 * setup.model.parameters if setup.is_autocast else 0


def blocked_bytes(setup: Setup) -> int:
    """Return the bytes of the copies in oneDNN's layout that a CPU samples with in float32."""
    is_float32 = FLOAT32 == setup.compute_bytes == setup.model.parameter_bytes
    if setup.cluster.is_gpu or not is_float32 or setup.step.completion_tokens < MIN_TOKENS:
        return 0
    return FLOAT32 * setup.model.large_linear_parameters


def gathered_layer_bytes(setup: Setup) -> int:
    """Return the bytes of gathered weights in the update: two layers, embeddings and head.

    The next layer is gathered while one computes; or all layers stay. A layer's gradient is whole
    before it is divided.
    """
    if not setup.sharding.weights or setup.ranks == 1:
        return 0
    sizes = setup.model
    weights = 2 * sizes.layer_parameters + sizes.outer_parameters
    if setup.sharding.keeps_layers:
        weights = sizes.parameters
    trained = sizes.trained_parameters / sizes.parameters
    gradients = trained * sizes.layer_parameters * sizes.trained_bytes
    return round(weights * setup.gathered_bytes + gradients)


def gathered_model_bytes(setup: Setup) -> int:
    """Return the bytes of the whole model, which the policy's own sampling gathers."""
    if not setup.sharding.weights or setup.ranks == 1 or setup.sampler.kind != "policy":
        return 0
    return round(setup.model.parameters * setup.gathered_bytes)


def cache_rows(setup: Setup) -> int:
    """Return how many completions the policy samples together on a rank."""
    step = setup.step
    together = max(1, setup.sampler.max_concurrent // step.group_size) * step.group_size
    return min(step.num_rows, together)


def cache_bytes(setup: Setup) -> int:
    """Return the bytes of the keys and values of rows that are sampled together."""
    step, rows = setup.step, cache_rows(setup)
    tokens = rows * step.row_tokens
    if shares_prompts(setup):
        prompts = rows // step.group_size
        tokens = prompts * step.prompt_lengths[0] + rows * step.completion_tokens
    return round(setup.model.kv_values * tokens * setup.compute_bytes)


def shares_prompts(setup: Setup) -> bool:
    """Return whether rows of a group are likely to share the keys and values of their prompt."""
    step = setup.step
    samples_on_cpu = setup.sampler.kind == "policy" and not setup.cluster.is_gpu
    prompts = cache_rows(setup) // step.group_size
    saved = prompts * step.prompt_lengths[0] * (step.group_size - 1)
    return samples_on_cpu and saved >= MIN_SAVED_TOKENS


def sampled_logit_bytes(setup: Setup) -> int:
    """Return the bytes of the logits from which the next tokens are sampled."""
    copies = SAMPLING_COPIES + (SORTING_COPIES if setup.sampler.sorts else 0)
    return copies * FLOAT32 * cache_rows(setup) * setup.model.vocab_size


def read_prompt_bytes(setup: Setup) -> int:
    """Return the bytes of a layer that reads the prompts which one forward pass takes."""
    inner = setup.model.inner_values // setup.model.num_layers
    longest = setup.step.prompt_lengths[0]
    num_prompts = min(cache_rows(setup) // setup.step.group_size, prompts_at_once(longest))
    return PREFILL_VALUES * inner * num_prompts * longest * setup.compute_bytes


def optimizer_copy_bytes(setup: Setup) -> int:
    """Return the bytes of what exists only while the optimizer takes a step.

    DeepSpeed copies its part of the gradients into one tensor, and frees them before the optimizer
    copies weights; but stage 3 keeps them.
    """
    sharding, model = setup.sharding, setup.model
    values = model.trained_parameters / setup.share(sharding.optimizer)
    if sharding.step_values is not None:
        values = min(values, sharding.step_values)
    copies = setup.cluster.is_gpu and setup.optimizer.copies
    of_step = round(values * model.trained_bytes * copies) + setup.optimizer.step_bytes
    of_gradients = round(values * model.trained_bytes) if sharding.is_deepspeed else 0
    return of_gradients + of_step if sharding.weights else max(of_gradients, of_step)


def bucket_bytes(setup: Setup) -> int:
    """Return the bytes of DeepSpeed's buckets: two, in stage 3 one.

    They are allocated in full for any model; on a CPU, pages that nothing is written to take no
    memory.
    """
    model, values = setup.model, setup.sharding.bucket_values
    if not setup.sharding.weights:
        values *= 2
    if not setup.cluster.is_gpu:
        values = min(values, model.trained_parameters)
    return round(values * model.trained_bytes)


def reduced_bytes(setup: Setup) -> int:
    """Return the bytes of a bucket's gradients, which DeepSpeed copies to reduce them."""
    values = min(setup.sharding.bucket_values, setup.model.trained_parameters)
    return round(values * setup.model.trained_bytes)


def gradient_bytes(setup: Setup) -> int:
    """Return the bytes of the gradients that a rank keeps.

    Stage 1 of DeepSpeed has the gradients of all ranks only between micro-batches.
    """
    sharding, model = setup.sharding, setup.model
    has_one = setup.step.micro_batches == 1
    is_divided = sharding.gradients or (sharding.is_deepspeed and has_one)
    own = model.trained_parameters * model.trained_bytes / setup.share(is_divided)
    return round(2 * own if sharding.sums_apart and not has_one else own)
