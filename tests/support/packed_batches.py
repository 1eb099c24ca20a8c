"""Batches of given tokens, and the prefixes that a pack of them must hold, by plain loops."""

from __future__ import annotations

import random

import torch

from lit_grpo.policy.padding import pad
from lit_grpo.types import TrainBatch


def batch_of(*groups: list) -> TrainBatch:
    """Build a batch from a prompt, its completions, the next prompt, its completions, …"""
    prompts, completions = list(groups[::2]), groups[1::2]
    prompt_ids, prompt_mask = pad(prompts, 0, torch.long, left=True)
    flat = [row for group in completions for row in group]
    completion_ids, completion_mask = pad(flat, 0, torch.long)
    index = [n for n, group in enumerate(completions) for _ in group]
    return TrainBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        prompt_index=torch.tensor(index),
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        loss_mask=completion_mask,
        advantages=torch.linspace(-1, 1, len(flat)),
        sampler_logprobs=torch.zeros(completion_mask.shape),
    )


def random_groups(draw: random.Random, *, longest: int = 40, vocabulary: int = 3) -> list:
    """Draw groups for `batch_of` from so few tokens that rows often have a common prefix."""

    def tokens(most: int) -> list[int]:
        return [draw.randrange(1, vocabulary) for _ in range(draw.randint(1, most))]

    groups: list = []
    for _ in range(draw.randint(1, 4)):
        groups += [tokens(longest // 2), [tokens(longest // 2) for _ in range(draw.randint(1, 4))]]
    return groups


def prefixes(groups: list) -> list[tuple[int, ...]]:
    """Return the tokens before each completion token, row after row."""
    return [
        (*prompt, *row[:t])
        for prompt, rows in zip(groups[::2], groups[1::2], strict=True)
        for row in rows
        for t in range(len(row))
    ]
