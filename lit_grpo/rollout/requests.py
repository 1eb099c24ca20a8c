"""Prompts to requests and samples to completions, the same for servers and for in-process vLLM.

Because they share this code, the same seed draws the same completion whichever engine samples it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from lit_grpo.rollout.engine import SampledPolicy, Sampling
from lit_grpo.rollout.weights.store import WeightUpdate
from lit_grpo.types import Completion, FinishReason, Prompt, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Samples of one prompt."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    seeds: Mapping[int, int]
    """Number of the sample within its group -> its seed."""
    adapter: WeightUpdate | None = None
    """To sample with; None for the server's own weights."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """One completion as it grows."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Label of the weights that wrote each token; filled when it has ended."""
    finish_reason: FinishReason | None = None

    @property
    def is_whole(self) -> bool:
        """Whether each token has its logprob, a finite one, and its version."""
        finite = [one for one in self.logprobs if one is not None and isfinite(one)]
        return len(finite) == len(self.versions) == len(self.token_ids) > 0


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


def one_token_each(
    token_ids: Sequence[int], num_samples: int, temperature: float, adapter: WeightUpdate | None
) -> Request:
    """The next token of a sequence, sampled a few times."""
    return Request(
        token_ids=tuple(token_ids),
        sampling=Sampling(max_tokens=1, temperature=temperature),
        stop_token_ids=(),
        seeds={number: number for number in range(num_samples)},
        adapter=adapter,
    )


def stop_token_ids(policy: SampledPolicy, sampling: Sampling) -> list[int]:
    """The model's end-of-sequence tokens and the user's, in order."""
    configured = getattr(policy.model.generation_config, "eos_token_id", None)
    ids = {policy.tokenizer.eos_token_id, *sampling.stop_token_ids}
    ids.update(configured if isinstance(configured, list) else [configured])
    return sorted(token for token in ids if token is not None)


def completion_text(tokenizer: Tokenizer, token_ids: Sequence[int], sampling: Sampling) -> str:
    """The text of a completion, up to the first stop string that counts."""
    tokens = list(token_ids)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if not sampling.stop:
        return text
    uncounted = tokenizer.decode(tokens[: sampling.min_tokens], skip_special_tokens=True)
    first = len(uncounted)
    found = [place for stop in sampling.stop if (place := text.find(stop, first)) >= 0]
    return text[: min(found)] if found else text
