"""The share of a device's peak that an update uses."""

from __future__ import annotations

from collections.abc import Mapping

from _benchmark.workloads import ModelSize

PEAK_TFLOPS: Mapping[str, float] = {"H100": 790, "H200": 790, "A100": 312, "L40S": 362, "4090": 165}
"""Part of a device's name -> its peak in dense bfloat16. H100 and H200: the 989 of the data sheet
hold at full clocks; under their power limit large products reach about 790."""

FORMULA = "6 FLOP a weight and token; without attention's scores and recomputed logits"


def peak_tflops(device_name: str) -> float | None:
    """Return the device's peak, None if its name is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def update_flop(size: ModelSize, num_prompt_tokens: int, num_completion_tokens: int) -> float:
    """Return the model FLOP of a forward and backward pass: 2 a weight and token, and 4.

    The head runs on completion tokens only. The scores of attention (about 2% for contexts of a few
    hundred tokens) and logits that are computed again are left out.

    Args:
        num_prompt_tokens: Of distinct prompts.
    """
    layers = layer_parameters(size) * (num_prompt_tokens + num_completion_tokens)
    return 6.0 * (layers + size.vocab_size * size.hidden_size * num_completion_tokens)


def layer_parameters(size: ModelSize) -> int:
    """Return the weights of all layers, without biases and norms."""
    head_size = size.hidden_size // size.num_heads
    attention = 2 * size.hidden_size * head_size * (size.num_heads + size.num_kv_heads)
    mlp = 3 * size.hidden_size * size.intermediate_size
    return size.num_layers * (attention + mlp)
