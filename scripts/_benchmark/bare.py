"""The lower bound of an update: forward, logprobs and backward, and nothing else."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def bare_update_pass(model: Any, ids: Tensor, *, num_targets: int, micro_batch_rows: int) -> None:
    """Add up the gradient of the logprobs of the last tokens of all rows, and drop it.

    Args:
        ids: [rows, tokens] on the model's device.
    """
    for rows in ids.split(micro_batch_rows):
        targets = rows[:, -num_targets:, None]
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=num_targets).logits
        logits.float().log_softmax(-1).gather(-1, targets).mean().backward()
    model.zero_grad()
