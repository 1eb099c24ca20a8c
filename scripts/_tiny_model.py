"""The config of a model that trains within seconds, for scripts and tests that start real runs."""

from __future__ import annotations

from typing import Any

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
SPREAD_LLAMA = TINY_LLAMA | {"initializer_range": 0.1}
"""The same with larger random weights, so that its completions differ in likelihood."""
