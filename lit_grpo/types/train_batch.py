"""The padded tensors that the loss reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What the loss reads. Prompts stand once a group and are padded on the left, completions on
    the right, so that the last prompt token is always next to the first completion token.

    Example, B = 1, G = 2, P = 2, C = 3, prompt ``[5]``, completions ``[7, 8]`` and ``[7, 8, 9]``::

        prompt_ids      [[0, 5]]            prompt_mask      [[F, T]]
        completion_ids  [[7, 8, 0],         completion_mask  [[T, T, F],
                         [7, 8, 9]]                           [T, T, T]]
        prompt_index    [0, 0]
        logprobs[n, t] is the one of completion_ids[n, t] given all tokens before it.
    """

    prompt_ids: Tensor
    """[B, P]"""
    prompt_mask: Tensor
    """[B, P] True on the tokens of the prompt."""
    prompt_index: Tensor
    """[N] the row of ``prompt_ids`` that a completion continues."""
    completion_ids: Tensor
    """[N, C]"""
    completion_mask: Tensor
    """[N, C] True on every sampled token (what the model reads)."""
    loss_mask: Tensor
    """[N, C] True on the tokens to train; False rows are invalid or filtered."""
    advantages: Tensor
    """[N] 0 on invalid rows."""
    sampler_logprobs: Tensor
    """[N, C] what the sampler reported; 0 on padding."""
    old_logprobs: Tensor | None = None
    """[N, C] under the policy before the first update of this rollout step; None while the
    policy has not moved since, when they equal the current ones."""
    ref_logprobs: Tensor | None = None
    """[N, C] under the reference; None without one in the loss."""
    entropy_mask: Tensor | None = None
    """[N, C] True on the tokens of the loss mask whose entropy is high enough to have a surrogate;
    None where all have."""

    @property
    def num_rows(self) -> int:
        return self.completion_ids.shape[0]

    @property
    def surrogate_mask(self) -> Tensor:
        """[N, C] True on the tokens that may have a surrogate and an entropy bonus."""
        return self.loss_mask if self.entropy_mask is None else self.entropy_mask

    def select(self, rows: Tensor) -> TrainBatch:
        """The given rows with the prompts that they need, trimmed to their longest tokens."""
        prompt_rows, prompt_index = torch.unique(self.prompt_index[rows], return_inverse=True)
        prompt_length = int(self.prompt_mask[prompt_rows].sum(1).max())
        length = max(1, int(self.completion_mask[rows].sum(1).max()))
        first = self.prompt_ids.shape[1] - prompt_length

        def completions(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor[rows, :length]

        return replace(
            self,
            prompt_ids=self.prompt_ids[prompt_rows, first:],
            prompt_mask=self.prompt_mask[prompt_rows, first:],
            prompt_index=prompt_index,
            completion_ids=completions(self.completion_ids),
            completion_mask=completions(self.completion_mask),
            loss_mask=completions(self.loss_mask),
            advantages=self.advantages[rows],
            sampler_logprobs=completions(self.sampler_logprobs),
            old_logprobs=completions(self.old_logprobs),
            ref_logprobs=completions(self.ref_logprobs),
            entropy_mask=completions(self.entropy_mask),
        )

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same batch on another device."""
        moved = {
            name: value.to(device)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **moved)
