"""Define the workloads: sizes of a GRPO step, and the model, prompts and reward of all trainers.

It times nothing and depends on no trainer.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

EOS, PAD = 0, 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The sizes of one GRPO step.

    Args:
        mean_tokens: Mean length of a completion, which ends at random and at ``max_tokens`` at the
            latest; None for completions of ``max_tokens`` each.
        micro_batch_rows: Sizes of the update's micro-batches. Each trainer is timed with every
            one of them, and its fastest counts.
    """

    name: str
    num_prompts: int = 4
    group_size: int = 8
    prompt_tokens: int
    max_tokens: int
    mean_tokens: float | None = None
    micro_batch_rows: tuple[int, ...] = (32, 8)

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def packed_row_tokens(self) -> int:
        """A row's share of the tokens that the model must process.

        A prompt counts once per group. The last token of a completion does not count, since it
        predicts nothing.
        """
        return round(self.prompt_tokens / self.group_size) + self.max_tokens - 1


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="short_equal", prompt_tokens=32, max_tokens=64),
        Workload(name="short_varied", prompt_tokens=32, max_tokens=192, mean_tokens=48),
        Workload(
            name="long_shared",
            num_prompts=2,
            prompt_tokens=512,
            max_tokens=64,
            micro_batch_rows=(16, 8),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A Llama with random weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dtype: str = "float32"


SIZES = {
    "tiny": ModelSize(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
    ),
    "10m": ModelSize(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=1024,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
    ),
    "30m": ModelSize(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=7,
        num_heads=8,
        num_kv_heads=4,
    ),
    # The shapes of Qwen2.5 0.5B and 1.5B.
    "0.5b": ModelSize(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        dtype="bfloat16",
    ),
    "1.5b": ModelSize(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        dtype="bfloat16",
    ),
}


def write_inputs(workload: Workload, size: ModelSize, num_steps: int, directory: Path) -> None:
    """Write the model, the tokenizer and the prompts of all steps, for every trainer to read."""
    torch.manual_seed(0)
    build_model(workload, size).save_pretrained(directory)
    word_tokenizer(size.vocab_size).save_pretrained(directory)
    lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts(workload, size, num_steps))
    (directory / "train.jsonl").write_text("".join(lines))


def prompts(workload: Workload, size: ModelSize, num_steps: int) -> list[str]:
    """Return prompts of random words, each word being one token."""
    words = random.Random(0)
    choices = range(PAD + 1, size.vocab_size)
    return [
        " ".join(f"w{token}" for token in words.choices(choices, k=workload.prompt_tokens))
        for _ in range(workload.num_prompts * num_steps)
    ]


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    vocab = {"<eos>": EOS, "<pad>": PAD} | {f"w{i}": i for i in range(PAD + 1, vocab_size)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def build_model(workload: Workload, size: ModelSize) -> PreTrainedModel:
    """Return a random model that ends its completions as the workload says, in any sampler."""
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=workload.row_tokens,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, size.dtype)
    )
    set_eos_probability(model, eos_probability(workload))
    return model


def eos_probability(workload: Workload) -> float:
    """Return the probability of EOS at each token that gives the workload's mean length.

    The lengths are geometric, cut off at ``max_tokens``.
    """
    if workload.mean_tokens is None:
        return 0.0
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = (1 - (1 - middle) ** workload.max_tokens) / middle
        low, high = (middle, high) if mean > workload.mean_tokens else (low, middle)
    return low


@torch.no_grad()
def set_eos_probability(model: PreTrainedModel, probability: float) -> None:
    """Make EOS equally likely after any token.

    One hidden dimension is the same at every position, and the head computes the logit of EOS
    from that dimension alone.
    """
    model.model.embed_tokens.weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    head = model.lm_head.weight
    head[:, 0] = 0.0
    head[EOS] = 0.0
    hidden = model.model(input_ids=torch.randint(len(head), (4, 32))).last_hidden_state
    others = model.lm_head(hidden)[..., EOS + 1 :].float().logsumexp(-1).mean()
    odds = torch.tensor(probability / (1 - probability))
    logit = (odds.log() + others).clamp(min=-1e4)  # finite, and still never drawn
    head[EOS, 0] = logit / hidden[..., 0].float().mean()


def varied_reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return rewards that differ within a group, so that every row has a gradient, at no cost."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]
