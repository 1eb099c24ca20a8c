"""Setups of a step whose sizes are small round numbers."""

from __future__ import annotations

from dataclasses import replace

from lit_grpo.cli.estimate.devices import DEVICES, Cluster, Device
from lit_grpo.cli.estimate.model_sizes import ModelSizes, OptimizerSizes
from lit_grpo.cli.estimate.setup import Setup
from lit_grpo.cli.estimate.sharding import SHARDINGS
from lit_grpo.cli.estimate.step import step_sizes
from lit_grpo.training import UpdateConfig

SIZES = ModelSizes(
    num_layers=2,
    hidden_size=8,
    vocab_size=100,
    num_heads=2,
    query_values=8,
    kv_values=32,
    query_groups=2,
    linear_values=160,
    adapted_values=0,
    inner_values=40,
    parameters=1000,
    trained_parameters=1000,
    layer_parameters=300,
    linear_parameters=500,
    largest_tensor=200,
    large_linear_parameters=0,
    parameter_bytes=4,
    trained_bytes=4,
    buffer_bytes=0,
    has_adapter=False,
)
"""A layer keeps (160 + 40 - 32) / 2 = 84 values of a token, and 16 of keys and values."""
UNIT = Device(
    name="unit",
    memory=10**9,
    flops=1.0,
    flops_float32=1.0,
    bandwidth=1.0,
    link=1.0,
    network=0.5,
    attention_share=1.0,
    host_seconds_per_layer=0.0,
    host_seconds_per_pass=0.0,
    is_gpu=False,
)
"""A CPU that takes a second for everything."""
TOKENS, HEAD = 2 * 6 + 4 * 10, 40
PAIRS = 2 * 16 * 16 / 2 + 2 * 10 * 16
"""The first row of each group is causal, the other has a mask."""
BODY, ATTENTION, LOGITS = 2 * 500 * TOKENS, 4 * 8 * 2 * PAIRS, 2 * 800 * HEAD


def make(
    strategy: str = "single", ranks: int = 1, *, model=SIZES, device=None, **settings
) -> Setup:
    """Return a setup of two prompts of 6 tokens with two completions of 10 tokens each."""
    update = settings.pop("update", UpdateConfig())
    fields = {
        "model": model,
        "optimizer": OptimizerSizes(state_bytes=8000, copies=False),
        "step": step_sizes([6, 6], 10, num_ranks=ranks, group_size=2, update=update),
        "cluster": Cluster(device=device or DEVICES["H100"], per_node=ranks),
        "sharding": SHARDINGS[strategy],
    }
    return Setup(**(fields | settings))


def adapted(model: ModelSizes = SIZES, **changes) -> ModelSizes:
    """Return the sizes with an adapter of 100 parameters."""
    return replace(model, trained_parameters=100, has_adapter=True, adapted_values=60, **changes)
