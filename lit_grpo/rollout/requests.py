"""Turn prompts into requests and samples into completions, for servers and in-process vLLM.

Because engines share this code, the same seed gives the same completion with any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from lit_grpo.policy.chat_template import end_tokens
from lit_grpo.rollout.engine import SampledPolicy, Sampling
from lit_grpo.rollout.weights.store import WeightUpdate
from lit_grpo.types import Completion, Prompt
from lit_grpo.types.rollouts import FinishReason
from lit_grpo.types.tokenizer import Tokenizer

STREAM_INTERVAL = 64
"""Tokens of a completion between two events of its stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for some samples of one prompt."""

    token_ids: tuple[int, ...]
    """[P]"""
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    seeds: Mapping[int, int]
    """Index of each sample within its group -> its seed."""
    adapter: WeightUpdate | None = None
    """The adapter to sample with; None for the engine's own weights."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One completion while it is streamed."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Label of the weights that sampled each token; filled in when the sample has finished."""
    finish_reason: FinishReason | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it has tokens, and every token has a finite logprob and a version."""
        finite = [one for one in self.logprobs if one is not None and isfinite(one)]
        return len(finite) == len(self.versions) == len(self.token_ids) > 0


def group_requests(
    policy: SampledPolicy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    seed: int,
) -> list[Request]:
    """Return one request per prompt, for all completions of its group."""
    stops = tuple(stop_token_ids(policy, sampling))
    # Consecutive seeds within a group, as some servers require; no seed occurs in two groups.
    firsts = np.random.default_rng(seed).choice(2**31 // group_size, len(prompts), False)
    return [
        Request(
            token_ids=prompt.token_ids,
            sampling=sampling,
            stop_token_ids=stops,
            seeds={index: int(first) * group_size + index for index in range(group_size)},
        )
        for prompt, first in zip(prompts, firsts, strict=True)
    ]


def to_completion(sample: Sample | str, tokenizer: Tokenizer, sampling: Sampling) -> Completion:
    """Return the completion of a finished sample, or a failed one if given an error message."""
    if isinstance(sample, str):
        return Completion.failed(sample)
    assert sample.finish_reason is not None
    if sample.finish_reason == "length" and len(sample.token_ids) < sampling.max_tokens:
        return Completion.failed(
            f"cut at {len(sample.token_ids)} tokens, before max_tokens={sampling.max_tokens}: "
            "prompt and completion exceed the engine's max_model_len or its key-value cache"
        )
    return Completion(
        token_ids=tuple(sample.token_ids),
        sampler_logprobs=tuple(sample.logprobs),
        text=completion_text(tokenizer, sample.token_ids, sampling),
        finish_reason=sample.finish_reason,
        policy_versions=tuple(map(int, sample.versions)),
    )


def single_token_request(
    token_ids: Sequence[int], num_samples: int, temperature: float, adapter: WeightUpdate | None
) -> Request:
    """Return a request for several samples of the next token of a sequence."""
    return Request(
        token_ids=tuple(token_ids),
        sampling=Sampling(max_tokens=1, temperature=temperature),
        stop_token_ids=(),
        seeds={index: index for index in range(num_samples)},
        adapter=adapter,
    )


def stop_token_ids(policy: SampledPolicy, sampling: Sampling) -> list[int]:
    """Return the tokens that end a completion, sorted: the model's own and the user's."""
    return sorted({*end_tokens(policy.model, policy.tokenizer), *sampling.stop_token_ids})


def completion_text(tokenizer: Tokenizer, token_ids: Sequence[int], sampling: Sampling) -> str:
    """Return the text of a completion, up to the first stop string after ``min_tokens``."""
    tokens = list(token_ids)
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    if not sampling.stop:
        return text
    head = tokenizer.decode(tokens[: sampling.min_tokens], skip_special_tokens=True)
    found = [place for stop in sampling.stop if (place := text.find(stop, len(head))) >= 0]
    return text[: min(found)] if found else text
