"""The interface of rollout engines, and the sampling parameters that every engine honours.

An engine has no access to rewards and never changes the policy.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lit_grpo.types import Completion, Measurements, Prompt, check_range, setting_error
from lit_grpo.types import EngineFailed as EngineFailed
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.tokenizer import Tokenizer

LOOK_SECONDS = 1.0
"""Time between two calls of ``on_wait`` during a generation."""


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are sampled.

    Args:
        temperature: Divides the logits; 0 is greedy decoding.
        top_p: Sample from the smallest set of most likely tokens with this probability mass; 1
            keeps all tokens.
        top_k: Sample from the k most likely tokens; 0 keeps all tokens.
        max_tokens: Longest completion; one that reaches it has finish reason ``length``.
        min_tokens: Neither an end-of-sequence token nor a stop string is allowed before this many
            tokens.
        stop: Strings that end a completion. They are cut from its text, but not from its tokens.
        stop_token_ids: Tokens that end a completion, in addition to the model's end-of-sequence
            tokens and the token with which its chat template ends a turn.

    Raises:
        UserError: a value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        key = "model.sampling"
        check_fields(key, self)
        check_range(f"{key}.temperature", self.temperature, at_least=0)
        check_range(f"{key}.top_p", self.top_p, above=0, at_most=1)
        check_range(f"{key}.top_k", self.top_k, at_least=0)
        check_range(f"{key}.max_tokens", self.max_tokens, at_least=1)
        check_range(
            f"{key}.min_tokens",
            self.min_tokens,
            at_least=0,
            at_most=self.max_tokens,
            why="a completion ends at max_tokens",
        )
        if not all(self.stop):
            raise setting_error(
                f"{key}.stop",
                "strings of at least one character",
                self.stop,
                "an empty string would end every completion at once",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class SampledPolicy(Protocol):
    """The parts of a policy that an engine needs."""

    @property
    def model(self) -> Any:
        """A ``transformers`` causal language model, with its adapters if it has any."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def source(self) -> str | None:
        """Directory or hub id that ``model``, or its frozen base, was loaded from; None if its
        weights are stored nowhere."""


class RolloutEngine(ABC):
    """Turn prompts into completions, and report which policy version sampled each token.

    The trainer calls ``start`` once before the first ``generate``, ``load_weights`` before it
    samples with new weights, and ``close`` once at the end, even after an error.
    """

    overlaps_updates: bool = False
    """Whether it may generate, in another thread, while the policy is updated."""

    samples_with_policy: bool = False
    """Whether it runs the policy's own model to sample; a sharded one is then gathered. Without it,
    the first forward pass of a sharded policy's model is an error."""

    max_group_size: int | None = None
    """Most completions of a prompt that it samples; None without a limit."""

    precision: str = "32-true"
    """The trainer's; it is set before ``start``."""

    policy_vocab_size: int | None = None
    """Number of tokens that the policy has; it is set before ``start``."""

    version: int = -1
    """Policy version of the weights in use; -1 before the first ``load_weights``."""

    on_wait: Callable[[], None] = staticmethod(lambda: None)
    """Set by the trainer. It raises an exception if the run is to end; let that propagate. Call it
    about once a second while ``load_weights`` waits, equally often on every rank. In ``generate``
    call ``stop_if_asked`` instead, unless the engine samples in a thread of its own."""

    _looked_at = 0.0

    def stop_if_asked(self) -> None:
        """Call ``on_wait`` if that was not done within the last second.

        An engine that samples in the thread of its caller calls this between decode steps, so that
        a run can end without finishing them.
        """
        if not self.overlaps_updates and time.monotonic() - self._looked_at > LOOK_SECONDS:
            self.on_wait()
            self._looked_at = time.monotonic()

    def check_processes(self, num_processes: int, num_nodes: int) -> None:  # noqa: B027 - optional
        """Check that so many processes, on so many machines, can use the engine together.

        Raises:
            UserError: they cannot.
        """

    def check_installation(self) -> None:  # noqa: B027 - optional
        """Check that this machine has what rank 0 starts for the engine, before it loads a model.

        Raises:
            UserError: something is missing.
        """

    def default_dtype(self, policy: SampledPolicy) -> str:
        """Return the data type of a copy of the weights to sample with.

        Under ``bf16-mixed`` it is bfloat16, in which the trainer also computes.
        """
        if self.precision == "bf16-mixed":
            return "bfloat16"
        return str(policy.model.dtype).removeprefix("torch.")

    def start(self, policy: SampledPolicy) -> None:  # noqa: B027 - optional
        """Load the model to sample with, or launch or connect to servers."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        """Yield (row, completion) as each finishes; row n is completion n % G of prompt n // G.

        Each of the ``len(prompts) * group_size`` rows comes exactly once, in any order; one that
        could not be sampled is yielded as ``Completion.failed``. The same prompts, sampling, seed
        and weights give the same completions. Closing the iterator aborts the
        completions that are still running.

        A completion has tokens of the policy's vocabulary, one sampler logprob per token, policy
        versions for all tokens or none, and a `FinishReason`. Logprobs are at most 0 and finite:
        minus infinity would put the ratio of policy and sampler at its bound, and metrics such as
        ``sampler/entropy`` at infinity. An engine that does not keep to this ends the run with an
        error.

        Raises:
            EngineFailed: the engine can no longer sample.
        """

    @abstractmethod
    def load_weights(self, policy: SampledPolicy, version: int) -> None:
        """Sample with the policy's current weights from now on; every rank must call it.

        Raises:
            EngineFailed: the weights could not be updated.
        """

    def health(self) -> bool:
        """Return whether the engine can sample now."""
        return True

    @property
    def num_unfinished_tokens(self) -> int:
        """Tokens of the completions that are not finished; 0 if it cannot tell.

        They show that it advances while no completion ends. Other threads read this.
        """
        return 0

    def describe_pending(self) -> str:
        """Describe the work in progress for the report of a stall; "" if it is not known."""
        return ""

    def observe(self) -> Measurements:
        """Return what was measured since the last call, for the metrics of a rollout step."""
        return Measurements()

    def close(self) -> None:  # noqa: B027 - optional
        """Release what ``start`` acquired."""
