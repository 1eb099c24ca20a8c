"""A model and settings with which a real vLLM works on a CPU, quickly."""

from typing import Any

from tiny import LLAMA

# vLLM's attention on a CPU wants heads of 32; a reload leaves a tied head stale there.
ARCHITECTURE = LLAMA | {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
MAX_MODEL_LEN = 320
"""Room for a proof's sequences, and for few more."""
FLAGS: dict[str, Any] = {
    "enforce-eager": True,
    "max-num-seqs": 64,
    "kv-cache-memory-bytes": 32 * 2**20,
    "block-size": 32,
    # Room for whole prompts: one in parts, with a seed, ends vLLM's engine on a CPU.
    "max-num-batched-tokens": 64 * MAX_MODEL_LEN,
}
ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than any test
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or every server's worker keeps to the first core
}
