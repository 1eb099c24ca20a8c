"""A model and settings with which a real vLLM runs on a CPU, quickly."""

from typing import Any

from tiny import LLAMA

# On a CPU, vLLM's attention needs heads of 32, and a reload does not update a tied head.
ARCHITECTURE = LLAMA | {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MAX_MODEL_LEN = 320
"""Longer than the sequences of a weight check."""
FLAGS: dict[str, Any] = {
    "enforce-eager": True,
    "max-num-seqs": 64,
    "kv-cache-memory-bytes": 32 * 2**20,
    "block-size": 32,
    # Fits whole prompts: on a CPU, vLLM's engine fails on a partial prompt with a seed.
    "max-num-batched-tokens": 64 * MAX_MODEL_LEN,
}
ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compilation takes longer than any test
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or the workers of all servers share the first core
}
