"""A request to the test server: its sampling parameters and its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from _sglang_llama import Cache


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The supported part of SGLang's sampling parameters, with their names and defaults."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        most = 1 << 30 if self.max_new_tokens is None else self.max_new_tokens
        rules = {
            "temperature must be a non-negative finite number": 0 <= self.temperature < 1e9,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be -1 (disable) or at least 1": self.top_k == -1 or self.top_k >= 1,
            "min_new_tokens must be in [0, max_new_tokens]": 0 <= self.min_new_tokens <= most,
        }
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"{rule}, got {getattr(self, rule.split()[0])}.")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6 or self.top_k == 1

    @property
    def scale(self) -> float:
        """The divisor of the logits; SGLang turns temperature 0 into top_k 1 at temperature 1."""
        return 1.0 if self.temperature < 1e-6 else self.temperature


@dataclass(eq=False, kw_only=True)
class Request:
    """One sequence; it is running while it has a cache, and queued while it has none."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    adapter: str | None = None
    logprob_start_len: int = -1
    """First prompt token with a logprob; -1 for none."""
    prompt_logprobs: list[float | None] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Label of the weights that sampled each token."""
    finish_reason: dict[str, Any] | None = None
    cache: Cache | None = None
    num_retractions: int = 0
    is_aborted: bool = False

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def version_spans(self) -> list[dict[str, Any]]:
        """Runs of tokens sampled by the same weights, ``end`` exclusive."""
        spans, end = [], 0
        for version, run in groupby(self.versions):
            start, end = end, end + len(list(run))
            spans.append({"version": version, "start": start, "end": end})
        return spans


def within(logprobs: Any, params: SamplingParams) -> Any:
    """Return [V] logprobs, minus infinity outside the top-k tokens and the top-p mass."""
    order = np.argsort(-logprobs, kind="stable")
    probabilities = np.exp(logprobs[order])
    mass_before = probabilities.cumsum() - probabilities
    kept = order[mass_before <= params.top_p][: None if params.top_k == -1 else params.top_k]
    truncated = np.full_like(logprobs, -np.inf)
    truncated[kept] = logprobs[kept]
    return truncated
