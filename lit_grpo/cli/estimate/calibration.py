"""Measure the CPU of this machine as a device to plan for; takes a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import skip_init
from transformers import DynamicCache, LlamaConfig, LlamaModel

from lit_grpo.cli.estimate.devices import CPU, GB, Device
from lit_grpo.cli.estimate.model_sizes import ModelSizes
from lit_grpo.rollout.hf.blocked_weights import BlockedWeights
from lit_grpo.rollout.hf.row_cache import cache_name

REPEATS, FEWEST_REPEATS = 9, 3
MOST_SECONDS = 5.0
"""Time after which only the fewest repeats are made, as for a large model on a CPU."""
MANY_ROWS = 1024
"""Rows of the products that are timed for training, as many as a small micro-batch has tokens."""
QUERIES, KEYS, ATTENDING_ROWS = 64, 128, 8
"""The attention that is timed: tokens of a completion, of a row, and rows."""
COPIED_VALUES = 2**24
"""Float32 values that are copied to time the memory: more than a cache holds."""
FEW_LAYERS, MANY_LAYERS = 2, 10
DECODED_TOKENS = 8


def measure_cpu(model: ModelSizes, num_rows: int, num_tokens: int) -> Device:
    """Return the CPU with the rates that its threads reach now.

    Args:
        model: The model, whose shapes are timed.
        num_rows: Completions that are sampled at a time.
        num_tokens: Tokens of a completion, at most.
    """
    many, few = _products(model, MANY_ROWS), _products(model, num_rows, num_tokens)
    training, sampling = _attention(model, ATTENDING_ROWS, QUERIES), _attention(model, num_rows, 1)
    many_16, few_16 = (
        _products(model, rows, dtype=torch.bfloat16) for rows in (MANY_ROWS, num_rows)
    )
    kinds = (many, few, training, sampling, many_16, few_16)
    seconds = shortest(*(one for one, _ in kinds))
    rates = [flops / one for (_, flops), one in zip(kinds, seconds, strict=True)]
    per_layer, per_pass = _host_seconds()
    copying, making = _memory_rates()
    return Device(
        name=CPU,
        memory=psutil.virtual_memory().total,
        flops=rates[4],
        flops_float32=rates[0],
        bandwidth=copying,
        link=1.0 * GB,  # gloo between processes of a machine
        network=0.1 * GB,
        attention_share=rates[2] / rates[0],
        few_rows_share=rates[1] / rates[0],
        few_rows_share_16=rates[5] / rates[4],
        few_rows_attention_share=rates[3] / rates[2],
        fresh_bandwidth=making,
        host_seconds_per_layer=per_layer,
        host_seconds_per_pass=per_pass,
        is_gpu=False,
    )


def shortest(*functions: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Return the shortest time of each function; they are called in turns, after one call each.

    Slow ones are called fewer times. Other work on the machine makes times longer, never shorter.
    With one thread its time on a core counts, which leaves out when another process has it.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in functions]
    begin = time.perf_counter()
    for turn in range(repeats + 1):
        if turn > FEWEST_REPEATS and time.perf_counter() - begin > MOST_SECONDS:
            break
        for function, found in zip(functions, times, strict=True):
            start = clock()
            function()
            if turn:
                found.append(clock() - start)
    return [min(found) for found in times]


Timed = tuple[Callable[[], object], float]
"""The function to time, and its number of operations."""


def _products(
    model: ModelSizes, rows: int, num_tokens: int = 0, *, dtype: torch.dtype = torch.float32
) -> Timed:
    """Return the products of a layer; small matrices have another rate than large ones.

    Args:
        num_tokens: Tokens of a completion that is sampled with them; 0 in training.
    """
    hidden, queries = model.hidden_size, model.query_values
    inner = max(hidden, model.inner_values // model.num_layers)
    kv = model.kv_values // model.num_layers // 2
    shapes = [(hidden, queries), (hidden, kv), (hidden, kv), (queries, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    layers = nn.ModuleList(
        skip_init(nn.Linear, *shape, bias=False, dtype=dtype) for shape in shapes
    )
    for parameter in layers.parameters():
        nn.init.ones_(parameter)  # random values of large models take seconds
    tokens = {inputs: torch.ones(rows, inputs, dtype=dtype) for inputs, _ in shapes}
    blocked = BlockedWeights(layers, num_tokens)

    @torch.no_grad()
    def multiply() -> None:
        with blocked.used():
            for (inputs, _), layer in zip(shapes, layers, strict=True):
                layer(tokens[inputs])

    return multiply, 2.0 * rows * sum(inputs * outputs for inputs, outputs in shapes)


def _attention(model: ModelSizes, rows: int, queries: int) -> Timed:
    """Return attention over keys that query heads share, with a mask if there are many queries."""
    kv_heads = model.num_heads // model.query_groups
    head_size = model.query_values // model.num_heads
    num_queries = queries * model.query_groups
    query = torch.ones(rows, kv_heads, num_queries, head_size)
    keys = torch.ones(rows, kv_heads, KEYS, head_size)
    mask = torch.ones(rows, 1, num_queries, KEYS, dtype=torch.bool) if queries > 1 else None
    flops = 4.0 * rows * queries * KEYS * model.query_values
    return partial(scaled_dot_product_attention, query, keys, keys, mask), flops


def _memory_rates() -> tuple[float, float]:
    """Return the bytes per second of copying, and of getting memory from the system.

    Both depend on where the memory lies, so several tensors are copied.
    """
    pairs = [(torch.ones(COPIED_VALUES), torch.empty(COPIED_VALUES)) for _ in range(3)]
    copies = [partial(target.copy_, source) for source, target in pairs]
    filling = partial(pairs[0][1].fill_, 1.0)
    *copying, filled, made = shortest(*copies, filling, partial(torch.ones, COPIED_VALUES))
    size = pairs[0][0].nbytes
    return 2 * size / min(copying), size / max(made - filled, 1e-9)


def _host_seconds() -> tuple[float, float]:
    """Return the overhead of a layer that computes almost nothing, and of the rest of the model."""
    few, many = shortest(*map(_decoding, (FEW_LAYERS, MANY_LAYERS)))
    layer = max(0.0, many - few) / (MANY_LAYERS - FEW_LAYERS)
    rest = max(0.0, few - FEW_LAYERS * layer)
    return layer / DECODED_TOKENS, rest / DECODED_TOKENS


def _decoding(num_layers: int) -> Callable[[], None]:
    """Return a function that runs a tiny model on some tokens, one after another."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model: Any = LlamaModel(config)
    model.eval()
    name = cache_name(model)
    token: Tensor = torch.ones(1, 1, dtype=torch.long)

    @torch.no_grad()
    def decode() -> None:
        cache = DynamicCache()
        for _ in range(DECODED_TOKENS):
            model(input_ids=token, use_cache=True, **{name: cache})

    return decode
