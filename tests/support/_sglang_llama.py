"""A Llama and its adapters in numpy: the test server starts in half a second without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float32]
Cache = list[tuple[Array, Array]]
"""Keys and values of each layer, [key-value heads, L, D]."""


class Llama:
    """A checkpoint of ``LlamaForCausalLM`` without biases, in float32."""

    def __init__(self, directory: str | Path) -> None:
        self.config: dict[str, Any] = json.loads(Path(directory, "config.json").read_text())
        assert self.config["model_type"] == "llama", "the test server knows no other architecture"
        self.weights = read_weights(directory)
        self.adapters: dict[str, Adapter] = {}

    def load_weights(self, directory: str | Path) -> None:
        """Replace the weights in the directory's files; change nothing if one does not fit."""
        new = read_weights(directory)
        for name, value in new.items():
            if self.weights[name].shape != value.shape:
                raise ValueError(f"{name} has shape {value.shape}")
        self.weights |= new

    def lose_weights(self) -> None:
        self.weights = {name: np.zeros_like(value) for name, value in self.weights.items()}

    def forward(self, token_ids: list[int], cache: Cache, adapter: str | None = None) -> Array:
        """Return [L, V] logits of the new tokens, and extend the cache by them."""
        layers = Layers(self, self.adapters.get(adapter or ""))
        x = self.weights["model.embed_tokens.weight"][token_ids]
        for number in range(self.config["num_hidden_layers"]):
            x = layers.run(number, x, cache)
        x = layers.norm("model.norm", x)
        is_tied = "lm_head.weight" not in self.weights
        return layers.linear("model.embed_tokens" if is_tied else "lm_head", x)


class Adapter:
    """A LoRA adapter as ``peft`` writes it."""

    def __init__(self, directory: str | Path) -> None:
        config = json.loads(Path(directory, "adapter_config.json").read_text())
        assert not config["use_rslora"]
        assert not config["use_dora"]
        self.rank: int = config["r"]
        self.scale: float = config["lora_alpha"] / config["r"]
        self._factors = read_weights(directory)

    def delta(self, layer: str, x: Array) -> Array | float:
        """Return what it adds to the output of a layer."""
        prefix = f"base_model.model.{layer}"
        down = self._factors.get(f"{prefix}.lora_A.weight")
        if down is None:
            return 0.0
        up = self._factors[f"{prefix}.lora_B.weight"]
        return np.float32(self.scale) * (x @ down.T @ up.T)


class Layers:
    """The layers of a model, with an adapter or without one."""

    def __init__(self, model: Llama, adapter: Adapter | None) -> None:
        config = model.config
        self._weights, self._adapter = model.weights, adapter
        self._eps = np.float32(config["rms_norm_eps"])
        self._num_heads = config["num_attention_heads"]
        self._num_kv_heads = config["num_key_value_heads"]
        self._head_dim = config["head_dim"]
        self._theta = config["rope_parameters"]["rope_theta"]

    def run(self, number: int, x: Array, cache: Cache) -> Array:
        """Return [L, H] of the new tokens after a layer."""
        layer = f"model.layers.{number}"
        x = x + self._attend(number, self.norm(f"{layer}.input_layernorm", x), cache)
        hidden = self.norm(f"{layer}.post_attention_layernorm", x)
        gate = self.linear(f"{layer}.mlp.gate_proj", hidden)
        gate = gate / (1 + np.exp(-gate)) * self.linear(f"{layer}.mlp.up_proj", hidden)
        return x + self.linear(f"{layer}.mlp.down_proj", gate)

    def norm(self, name: str, x: Array) -> Array:
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + self._eps)
        return x * scale * self._weights[f"{name}.weight"]

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self._weights[f"{name}.weight"].T
        return y + self._adapter.delta(name, x) if self._adapter else y

    def _attend(self, number: int, x: Array, cache: Cache) -> Array:
        name = f"model.layers.{number}.self_attn"
        start = cache[number][0].shape[1] if number < len(cache) else 0
        query = self._rotate(self._heads(f"{name}.q_proj", x, self._num_heads), start)
        key = self._rotate(self._heads(f"{name}.k_proj", x, self._num_kv_heads), start)
        value = self._heads(f"{name}.v_proj", x, self._num_kv_heads)
        if number < len(cache):
            key, value = (
                np.concatenate([old, new], 1)
                for old, new in zip(cache[number], (key, value), strict=True)
            )
            cache[number] = key, value
        else:
            cache.append((key, value))
        repeats = self._num_heads // self._num_kv_heads
        scale = 1 / np.sqrt(np.float32(self._head_dim))
        scores = query @ key.repeat(repeats, 0).transpose(0, 2, 1) * scale
        is_future = np.arange(key.shape[1]) > start + np.arange(len(x))[:, None]
        weights = np.exp(log_softmax(np.where(is_future, -np.inf, scores)))
        attended = weights.astype(np.float32) @ value.repeat(repeats, 0)
        return self.linear(f"{name}.o_proj", attended.transpose(1, 0, 2).reshape(len(x), -1))

    def _heads(self, name: str, x: Array, num_heads: int) -> Array:
        """Return [heads, L, D]."""
        return self.linear(name, x).reshape(len(x), num_heads, -1).transpose(1, 0, 2)

    def _rotate(self, x: Array, start: int) -> Array:
        """Apply rotary position embeddings to [heads, L, D]."""
        half = self._head_dim // 2
        frequencies = self._theta ** (-np.arange(half) / half)
        angles = (start + np.arange(x.shape[1]))[:, None] * np.tile(frequencies, 2)
        rotated = np.concatenate([-x[..., half:], x[..., :half]], -1)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return x * cos + rotated * sin


def log_softmax(logits: NDArray[Any]) -> NDArray[Any]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def read_weights(directory: str | Path) -> dict[str, Array]:
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ValueError(f"Cannot find any model weights with `{directory}`")
    return {name: value for file in files for name, value in load_file(file).items()}
