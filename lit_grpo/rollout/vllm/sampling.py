"""vLLM's sampling parameters and adapter sizes, the same in this process and in a server.

Source: vLLM's sampling parameters, checked against release 0.32.
"""

from __future__ import annotations

from typing import Any, Literal

from lit_grpo.rollout.engine import Sampling
from lit_grpo.rollout.requests import Request
from lit_grpo.types import UserError, check_range

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]

MAX_TEMPERATURE = 2.0

MAX_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Allowed values of vLLM's setting ``max_lora_rank``."""


def check_sampling(sampling: Sampling, logprobs_mode: LogprobsMode) -> None:
    """Check that vLLM reports logprobs that can be compared with the trainer's.

    Raises:
        UserError: it does not with these settings.
    """
    check_range(
        "model.sampling.temperature", sampling.temperature, at_most=MAX_TEMPERATURE, why="with vLLM"
    )
    truncates = sampling.top_p < 1 or sampling.top_k > 0
    is_raw = logprobs_mode == "raw_logprobs"
    if truncates and not is_raw and not sampling.is_greedy:
        raise UserError(
            f"top_p must be 1 and top_k 0 with vLLM, got {sampling.top_p} and {sampling.top_k} "
            "(it reports logprobs of the truncated distribution, which cannot be compared with "
            "the trainer's). Set model.sampling.top_p to 1 and model.sampling.top_k to 0 or, at "
            "temperature 1, model.engine.init_args.logprobs_mode to raw_logprobs."
        )
    if is_raw and sampling.temperature not in (0, 1):
        raise UserError(
            f"logprobs_mode must be processed_logprobs at temperature {sampling.temperature}, got "
            "raw_logprobs (which ignore the temperature). Set model.engine.init_args.logprobs_mode."
        )


def sampling_params(request: Request, *, num_samples: int, seed: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters; vLLM seeds sample j of several with ``seed + j``."""
    sampling = request.sampling
    return {
        "n": num_samples,
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }


def max_adapter_rank(rank: int) -> int:
    """Return the smallest ``max_lora_rank`` for an adapter of this rank.

    Raises:
        UserError: the rank is too large.
    """
    check_range(
        "model.policy.lora.rank",
        rank,
        at_most=MAX_ADAPTER_RANKS[-1],
        why="vLLM takes no larger adapter, but takes the whole policy with "
        "model.engine.init_args.weight_sync full",
    )
    return next(one for one in MAX_ADAPTER_RANKS if one >= rank)
