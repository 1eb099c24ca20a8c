"""What vLLM is asked alike as a server and in this process. Imports no vLLM.

Source: vLLM's sampling parameters, checked against release 0.32.
"""

from __future__ import annotations

from typing import Any, Literal

from lit_grpo.rollout.engine import Sampling
from lit_grpo.rollout.requests import Request
from lit_grpo.types import UserError

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The room for an adapter is one of these."""


def check_sampling(sampling: Sampling, logprobs_mode: LogprobsMode) -> None:
    """Refuse what vLLM would do otherwise than asked.

    Raises:
        ValueError: what, why and what to set.
    """
    truncates = sampling.top_p < 1 or sampling.top_k > 0
    is_raw = logprobs_mode == "raw_logprobs"
    if truncates and not is_raw and not sampling.is_greedy:
        raise UserError(
            "top_p and top_k make vLLM report logprobs of what they leave over, which the "
            "trainer's cannot be compared with. Set model.sampling.top_p to 1 and top_k to 0, "
            "or, at temperature 1, model.engine.init_args.logprobs_mode to raw_logprobs."
        )
    if is_raw and sampling.temperature not in (0, 1):
        raise UserError(
            f"logprobs_mode must be processed_logprobs at temperature {sampling.temperature} "
            "(raw ones ignore the temperature). Set model.engine.init_args.logprobs_mode."
        )


def sampling_params(request: Request, *, num_samples: int, seed: int) -> dict[str, Any]:
    """vLLM's own names; it seeds sample j of several with ``seed + j``."""
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


def adapter_room(rank: int) -> int:
    """The least room that an adapter of this rank fits into.

    Raises:
        ValueError: it fits into none.
    """
    fitting = [room for room in ADAPTER_RANKS if room >= rank]
    if not fitting:
        raise UserError(
            f"an adapter for vLLM must have a rank <= {ADAPTER_RANKS[-1]}, got {rank}. Set "
            "model.policy.lora.rank, or model.engine.init_args.weight_sync to full."
        )
    return fitting[0]
