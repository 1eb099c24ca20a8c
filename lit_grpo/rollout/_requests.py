"""Prompts to requests and samples to completions: the same for servers and for vLLM in this
process, so that the same seed draws the same. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_grpo.rollout._dialect import Request, Sample
from lit_grpo.rollout._stops import completion_text, stop_token_ids
from lit_grpo.rollout.engine import SampledPolicy, Sampling
from lit_grpo.types import Completion, Prompt, Tokenizer


def group_requests(
    policy: SampledPolicy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seed: int,
) -> list[Request]:
    """One request a prompt, for the completions of its group."""
    stops = tuple(stop_token_ids(policy, sampling))
    # The samples of a prompt have neighbouring seeds, those of two prompts never the same.
    firsts = np.random.default_rng(seed).choice(2**31 // group_size, len(prompts), False)
    return [
        Request(
            token_ids=prompt.token_ids,
            sampling=sampling,
            stop_token_ids=stops,
            seeds={sample: int(first) * group_size + sample for sample in range(group_size)},
        )
        for prompt, first in zip(prompts, firsts, strict=True)
    ]


def to_completion(sample: Sample | str, tokenizer: Tokenizer, sampling: Sampling) -> Completion:
    """A sample that has ended, or why there is none."""
    if isinstance(sample, str):
        return Completion.failed(sample)
    assert sample.finish_reason is not None
    if sample.finish_reason == "length" and len(sample.token_ids) < sampling.max_tokens:
        return Completion.failed(
            f"cut at {len(sample.token_ids)} tokens, where {sampling.max_tokens} may be sampled: "
            "with its prompt it is longer than the engine's max_model_len, or than its cache"
        )
    return Completion(
        token_ids=tuple(sample.token_ids),
        sampler_logprobs=tuple(sample.logprobs),
        text=completion_text(tokenizer, sample.token_ids, sampling),
        finish_reason=sample.finish_reason,
        policy_versions=tuple(map(int, sample.versions)),
    )
