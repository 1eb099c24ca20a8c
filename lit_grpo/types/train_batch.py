"""The padded tensors that the model and the loss read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Input of the model: every prompt once, and the completions that continue it.

    A batch stays on the CPU, where rows are selected and packed without waiting for a GPU. Only
    what a micro-batch computes with is moved.

    Prompts are padded on the left, completions on the right, so the last prompt token is
    always next to the first completion token.

    Example, B = 1, G = 2, P = 2, C = 3, prompt ``[5]``, completions ``[7, 8]`` and ``[7, 8, 9]``::

        prompt_ids      [[0, 5]]            prompt_mask      [[F, T]]
        completion_ids  [[7, 8, 0],         completion_mask  [[T, T, F],
                         [7, 8, 9]]                           [T, T, T]]
        prompt_index    [0, 0]
        logprobs[n, t] is the logprob of completion_ids[n, t] given all tokens before it.
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
    """[N, C] True on every sampled token."""

    @property
    def num_rows(self) -> int:
        return self.completion_ids.shape[0]

    def select(self, rows: Tensor) -> Self:
        """Return the given rows and their prompts, trimmed to the longest of each."""
        prompt_rows, prompt_index = torch.unique(self.prompt_index[rows], return_inverse=True)
        prompt_length = int(self.prompt_mask[prompt_rows].sum(1).max())
        length = max(1, int(self.completion_mask[rows].sum(1).max()))
        first = self.prompt_ids.shape[1] - prompt_length
        of_rows = {
            name: value[rows] if value.ndim == 1 else value[rows, :length]
            for name, value in self._tensors().items()
            if not name.startswith("prompt_")
        }
        return replace(
            self,
            prompt_ids=self.prompt_ids[prompt_rows, first:],
            prompt_mask=self.prompt_mask[prompt_rows, first:],
            prompt_index=prompt_index,
            **of_rows,
        )

    def to(self, device: torch.device | str) -> Self:
        """Return the same batch on another device, without waiting for a GPU."""
        wait = torch.device(device).type == "cpu"
        moved: dict[str, Any] = {
            name: one.to(device, non_blocking=not wait) for name, one in self._tensors().items()
        }
        return replace(self, **moved)

    def _tensors(self) -> dict[str, Any]:
        """Return every field that is not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch(TokenBatch):
    """Input of the loss: the tokens, the mask of trained tokens, and all quantities that stay
    fixed during the update."""

    loss_mask: Tensor
    """[N, C] True on the tokens in the loss; False throughout on excluded rows."""
    advantages: Tensor
    """[N], or [N, C] with one for each token; 0 on excluded rows."""
    sampler_logprobs: Tensor
    """[N, C] as the sampler reported them; 0 on padding."""
    old_logprobs: Tensor | None = None
    """[N, C] under the policy before the first update of this rollout step; None if they equal
    the current ones because no update has happened yet."""
    ref_logprobs: Tensor | None = None
    """[N, C] under the reference; None without a KL term in the loss."""
    teacher_logprobs: Tensor | None = None
    """[N, C] under the teacher, or [N, C, K] of the tokens in ``teacher_ids``; None without a
    `DistillationTerm`."""
    teacher_ids: Tensor | None = None
    """[N, C, K] the most likely tokens under the teacher; None if only the sampled one counts."""
    is_good: Tensor | None = None
    """[N] True on the completions whose likelihood is raised; None without such a term."""
    covariance_mask: Tensor | None = None
    """[N, C] True on the tokens of high covariance; None without a `CovarianceTerm`."""
    entropy_mask: Tensor | None = None
    """[N, C] True on the tokens in the loss whose entropy is high enough to train on; None if all
    are."""

    @property
    def advantages_by_token(self) -> Tensor:
        """[N, C], or [N, 1] with one for all tokens of a completion."""
        return self.advantages if self.advantages.ndim == 2 else self.advantages[:, None]

    @property
    def surrogate_mask(self) -> Tensor:
        """[N, C] True on the tokens that may have a surrogate and an entropy bonus."""
        return self.loss_mask if self.entropy_mask is None else self.entropy_mask
