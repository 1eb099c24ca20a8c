"""Check that an engine samples from the policy's weights: compare its logprobs with the trainer's.

An engine may report the latest version and still sample from older weights. The sequences are
always the same, so a stale prefix cache is detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_grpo.policy.body_and_head import evaluation_mode
from lit_grpo.policy.packed.packed_attention import using_attention
from lit_grpo.policy.sharding import compute_device, whole_shape
from lit_grpo.rollout.engine import SampledPolicy
from lit_grpo.rollout.requests import Request, Sample, single_token_request
from lit_grpo.rollout.weights.store import WeightUpdate
from lit_grpo.types import check_range
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords

NUM_POSITIONS = 4
"""Last positions of each sequence whose next token is compared."""
NUM_SAMPLES = 4
"""Next tokens sampled at each position."""
MAX_SEQUENCE_TOKENS = 272
"""Longer than two blocks of any server's prefix cache."""
RESERVED_TOKENS = 4
"""Context left free: some servers reserve one or two tokens."""
CHECK_TEMPERATURE = 0.7
"""Unlike 1, it also detects an engine whose logprobs ignore the temperature."""
TOLERANCES = {"float32": 5e-3, "bfloat16": 0.1, "float16": 0.1}


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class WeightCheck:
    """How the trainer checks that an engine samples from the policy's weights.

    A few fixed sequences are run through the policy, and the engine's logprobs of the next tokens
    are compared with the policy's. A mismatch ends the run. A restarted server is always checked.

    Args:
        every: Weight updates between two checks. The first ones are closer together: at the first
            update and 1, 2, 4, 8, ... updates after it, until they are ``every`` apart. A server
            that was started with the very weights of the first update would pass that check
            without having read them.
        num_sequences: Sequences to compare.
        tolerance: Largest mean difference of the logprobs that passes; null for 0.005 with
            float32 weights and 0.1 with half precision.

    Raises:
        UserError: a value is out of range.
    """

    every: int = 50
    num_sequences: int = 4
    tolerance: float | None = None

    def __post_init__(self) -> None:
        key, why = "model.engine.init_args.weight_check", "unchecked weights may be stale"
        check_fields(key, self)
        check_range(f"{key}.every", self.every, at_least=1, why=why)
        check_range(f"{key}.num_sequences", self.num_sequences, at_least=1, why=why)
        check_range(f"{key}.tolerance", self.tolerance, above=0, why="no engine would pass")

    def is_due(self, num_updates: int) -> bool:
        """Return whether to check at the update that follows ``num_updates`` earlier ones."""
        is_early = num_updates < self.every and num_updates.bit_count() == 1  # a power of two
        return is_early or num_updates % self.every == 0


class WeightMismatch(Exception):
    """An engine does not sample from the policy's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLogprobs:
    """The logprobs that an engine with the policy's weights must report."""

    sequences: Tensor
    """[K, L] token ids."""
    logprobs: Tensor
    """[K, NUM_POSITIONS, V] float32 logprobs of the token after each of the last positions."""
    temperature: float
    tolerance: float

    def probes(self, adapter: WeightUpdate | None) -> list[tuple[Request, Tensor]]:
        """Return pairs (request for the next token of a prefix, [V] the trainer's logprobs)."""
        length = self.sequences.shape[1]
        return [
            (self._request(sequence[: length - NUM_POSITIONS + 1 + position], adapter), expected)
            for sequence, logprobs in zip(self.sequences, self.logprobs, strict=True)
            for position, expected in enumerate(logprobs)
        ]

    def _request(self, prefix: Tensor, adapter: WeightUpdate | None) -> Request:
        return single_token_request(prefix.tolist(), NUM_SAMPLES, self.temperature, adapter)


@torch.no_grad()
def expected_logprobs(
    policy: SampledPolicy,
    weight_check: WeightCheck,
    *,
    temperature: float,
    dtype: str,
    max_length: int | None,
) -> ExpectedLogprobs:
    """Run the sequences through the policy; under a sharded strategy every rank must call it.

    Autocast is off, so that the policy's own precision counts and not the trainer's.

    Args:
        dtype: Data type of the engine's weights; it sets the default tolerance.
        max_length: Longest sequence that the engine accepts.
    """
    model = policy.model
    vocabulary = whole_shape(model.get_input_embeddings().weight)[0]
    vocabulary = min(vocabulary, getattr(model.config, "vocab_size", vocabulary))
    length = min(MAX_SEQUENCE_TOKENS, (max_length or MAX_SEQUENCE_TOKENS) - RESERVED_TOKENS)
    drawn = np.random.default_rng(0).integers(vocabulary, size=(weight_check.num_sequences, length))
    sequences = torch.from_numpy(drawn)
    ids = sequences.to(compute_device(model))
    attention = model.config._attn_implementation or "sdpa"
    if "flash" in attention:  # has no kernel for float32
        attention = "sdpa"
    with (
        evaluation_mode(model),
        torch.autocast(ids.device.type, enabled=False),
        using_attention(model.config, attention),
    ):
        output = model(input_ids=ids, use_cache=False, logits_to_keep=NUM_POSITIONS)
    return ExpectedLogprobs(
        sequences=sequences,
        logprobs=(output.logits.float() / temperature).log_softmax(-1).cpu(),
        temperature=temperature,
        tolerance=TOLERANCES[dtype] if weight_check.tolerance is None else weight_check.tolerance,
    )


def logprob_pair(sample: Sample, expected: Tensor) -> tuple[float, float]:
    """Return the engine's and the trainer's logprob of a sampled token, given [V] expected."""
    return sample.logprobs[0], expected[sample.token_ids[0]].item()


def check_logprobs(
    pairs: Sequence[tuple[float, float]], expected: ExpectedLogprobs, engine_name: str
) -> float:
    """Return the mean difference between an engine's and the trainer's logprobs.

    Args:
        pairs: The engine's and the trainer's logprob of each token.
        engine_name: Name of the engine in the message.

    Raises:
        WeightMismatch: the difference exceeds the tolerance, or is not a number.
    """
    both = torch.tensor(pairs)
    engine, trainer = both.mean(0).tolist()
    difference = (both[:, 0] - both[:, 1]).abs().mean().item()
    if not difference <= expected.tolerance:
        raise WeightMismatch(
            f"{engine_name} does not sample from the policy's weights, although it reports their "
            f"version: its logprobs of {len(pairs)} tokens differ from the trainer's by "
            f"{difference:.3g} on average, where {expected.tolerance:g} is allowed (mean "
            f"{engine:.3f}, trainer {trainer:.3f}). The run would train on a different "
            "policy's rollouts. Known causes: tied embeddings on a CPU; a prefix cache that was "
            "not reset after the update; a --logprobs-mode or dtype other than configured. If the "
            "engine's kernels are just less precise, set "
            "model.engine.init_args.weight_check.tolerance."
        )
    return difference
