"""The contract of a rollout engine, and the sampling parameters that all engines honour.

An engine never sees a reward and never changes the policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lit_grpo.types import Completion, Measurements, Prompt, Tokenizer, UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn.

    Args:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_p: Smallest set of likeliest tokens with this probability mass; 1 keeps all.
        top_k: The k likeliest tokens; 0 keeps all.
        max_tokens: A completion ends here at the latest, with finish reason ``length``.
        min_tokens: No end-of-sequence or stop token before this many.
        stop: Strings that end a completion; its text is cut before them, its tokens are not.
        stop_token_ids: Tokens that end a completion beside the model's end-of-sequence tokens.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rules = {
            "temperature must be >= 0": self.temperature >= 0,
            "top_p must lie in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be >= 0": self.top_k >= 0,
            "max_tokens must be >= 1": self.max_tokens >= 1,
            "min_tokens must lie in [0, max_tokens]": 0 <= self.min_tokens <= self.max_tokens,
            "stop must not hold an empty string": all(self.stop),
        }
        for rule, holds in rules.items():
            if not holds:
                name = rule.split()[0]
                raise UserError(f"{rule}, got {getattr(self, name)!r}. Set model.sampling.{name}.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class EngineFailed(RuntimeError):
    """An engine cannot go on: it has tried what it could. The run ends with this message."""


class SampledPolicy(Protocol):
    """What an engine needs of a policy."""

    @property
    def model(self) -> Any:
        """A ``transformers`` causal language model, with its adapters if it has any."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def source(self) -> str | None:
        """Directory or hub id of the weights that ``model``, or its frozen base, was loaded with;
        None where they stand nowhere."""


class RolloutEngine(ABC):
    """Turns prompts into completions; says which policy version wrote them.

    ``start`` comes once before the first ``generate`` and ``close`` once at the end, after an
    error too. An engine is stale until ``load_weights`` has been called.
    """

    overlaps_updates: bool = False
    """Whether it may generate, in another thread, while the policy is updated."""

    version: int = -1
    """Policy version of the weights in use; -1 before the first ``load_weights``."""

    def start(self, policy: SampledPolicy) -> None:  # noqa: B027 - nothing to start is a choice
        """Get ready to generate: load, launch or connect."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        """Yield (row, completion) as each finishes; row n is completion n % G of prompt n // G.

        The same prompts, sampling, seed and weights give the same completions. A row that could
        not be sampled comes as ``Completion.failed``. Closing the iterator ends what still runs.

        Raises:
            EngineFailed: there is nothing left to sample with.
        """

    @abstractmethod
    def load_weights(self, policy: SampledPolicy, version: int) -> None:
        """Take over the policy's present weights; all ranks must call it.

        Raises:
            EngineFailed: they did not arrive.
        """

    def health(self) -> bool:
        """Whether a request would be answered."""
        return True

    def observe(self) -> Measurements:
        """What was measured since the last call, for the metrics of a rollout step."""
        return Measurements()

    def close(self) -> None:  # noqa: B027 - nothing to close is a choice
        """Give back what ``start`` took."""
