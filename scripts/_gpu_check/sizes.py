"""The models and batches of the check: Qwen2.5 with random weights, or a tiny stand-in."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from _benchmark.workloads import SIZES, ModelSize, Workload

from lit_grpo.policy import Policy
from lit_grpo.training.batching import collate_tokens
from lit_grpo.types import Prompt, TokenBatch


@dataclass(frozen=True, kw_only=True)
class CheckSize:
    """How large the check is.

    Args:
        max_tokens_per_micro_batch: As in the update; the large one needs about 30 GB.
        learning_rate: AdamW's, at which the reward rises within the steps.
        larger_model: With which the aims are checked.
    """

    model: ModelSize
    larger_model: ModelSize
    workload: Workload
    max_tokens_per_micro_batch: int
    learning_rate: float

    @property
    def larger(self) -> CheckSize:
        return replace(self, model=self.larger_model)

    @property
    def architecture(self) -> dict[str, Any]:
        """The config of the model; its embedding is also its head."""
        model = self.model
        return {
            "model_type": "qwen2",
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }

    def loaded_policy(self, dtype: Literal["float32", "bfloat16"] = "float32") -> Policy:
        torch.manual_seed(0)
        policy = Policy(architecture=self.architecture, dtype=dtype)
        policy.load(with_reference=False)
        return policy

    def prompts(self, number: int) -> list[Prompt]:
        """Return prompts of random tokens."""
        draw = random.Random(0)
        return [
            Prompt(id=str(n), text=str(n), token_ids=self.tokens(draw, self.workload.prompt_tokens))
            for n in range(number)
        ]

    def tokens(self, draw: random.Random, number: int) -> tuple[int, ...]:
        return tuple(draw.randrange(self.model.vocab_size) for _ in range(number))

    def ragged_batch(self) -> TokenBatch:
        """Return groups of completions of many lengths, some of which begin alike."""
        draw, longest = random.Random(1), min(96, self.workload.max_tokens)
        prompts, completions = [], []
        for length in (longest, 5, longest // 2):
            prompts.append(self.tokens(draw, length))
            beginning = self.tokens(draw, longest // 2)
            for shared in (0, 0, longest // 2, longest // 2):
                rest = self.tokens(draw, draw.randint(1, longest // 2))
                completions.append(beginning[:shared] + rest)
        return collate_tokens(prompts, completions, pad_id=0)


FULL = CheckSize(
    model=SIZES["0.5b"],
    larger_model=SIZES["1.5b"],
    workload=Workload(
        name="gpu_check", num_prompts=8, group_size=16, prompt_tokens=128, max_tokens=128
    ),
    max_tokens_per_micro_batch=8192,
    learning_rate=1e-5,
)
TINY_MODEL = replace(SIZES["tiny"], vocab_size=512)  # at least the bytes of the byte tokenizer
TINY = CheckSize(
    model=TINY_MODEL,
    larger_model=replace(TINY_MODEL, num_layers=3),
    workload=Workload(name="gpu_check", num_prompts=2, group_size=4, prompt_tokens=8, max_tokens=8),
    max_tokens_per_micro_batch=24,
    learning_rate=1e-2,
)
