"""The memory of reward models that run on a device of the trainer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from lit_grpo.cli.estimate.model_sizes import weight_bytes
from lit_grpo.rewards import Reward, ScorerReward
from lit_grpo.rewards.reward_model.model import outline_scorer


def scorer_bytes(
    rewards: Iterable[Reward], row_tokens: int, gpus: Collection[str] | None
) -> tuple[int, int]:
    """Return the bytes of all weights, and of one batch of each model in a forward pass.

    Args:
        row_tokens: Tokens of the longest prompt and completion.
        gpus: Numbers of the trainer's GPUs; None if it trains on the CPU.

    Raises:
        UserError: a model cannot be read.
    """
    weights = passes = 0
    for one in rewards:
        if isinstance(one, ScorerReward) and _is_beside(one.settings.device, gpus):
            outline = outline_scorer(one.settings)
            weights += weight_bytes(outline)
            passes += _pass_bytes(outline, one, row_tokens)
    return weights, passes


def _is_beside(device: str, gpus: Collection[str] | None) -> bool:
    """Return whether a device of a reward model is one of the trainer."""
    kind, _, number = device.partition(":")
    if gpus is None:
        return kind in ("auto", "cpu")
    return kind == "auto" or (kind == "cuda" and (not number or number in gpus))


def _pass_bytes(outline: Any, reward: ScorerReward, row_tokens: int) -> int:
    """Return the bytes of one layer at a time, of which the feed-forward part is the largest.

    It has three values between its halves, plus its input and the residual. Attention has a
    mask for the padding.
    """
    config = outline.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    limits = (reward.settings.max_tokens, getattr(config, "max_position_embeddings", None))
    length = min(row_tokens, *(one for one in limits if one))
    per_token = 3 * inner + 3 * config.hidden_size
    values = reward.batch_size * length * (per_token + length)
    return int(values * outline.dtype.itemsize)
