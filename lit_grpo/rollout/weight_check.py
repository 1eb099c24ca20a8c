"""Whether a server holds the policy's weights, by what it samples. A server's word is no proof.

The same sequences every time, so that a server that answers from a stale cache is found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_grpo.concurrency import gather_or_cancel
from lit_grpo.policy.body_and_head import evaluation_mode
from lit_grpo.rollout.engine import SampledPolicy
from lit_grpo.rollout.requests import Request, Sample, one_token_each
from lit_grpo.rollout.server.api import ServerAPI
from lit_grpo.rollout.server.endpoint import Endpoint, ServerError
from lit_grpo.rollout.weights.store import WeightUpdate
from lit_grpo.types import UserError

NUM_PLACES = 4
"""Last positions of a sequence whose next token is compared."""
SPARE_PLACES = 4
"""Left over of a server's context: some keep one or two places to themselves."""
NUM_SAMPLES = 4
"""Next tokens that a server samples at each of them."""
LONGEST = 272
"""Tokens of a sequence: more than two blocks of any server's prefix cache."""
TOLERANCES = {"float32": 5e-3, "bfloat16": 0.1, "float16": 0.1}


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How it is proven that a server holds the policy's weights.

    At the first weight updates, then at every so many and after every restart some sequences are
    replayed through the trainer, and the server's logprobs compared with them.

    Args:
        every: Weight updates from one proof to the next. The first ones are closer together,
            1, 2, 4, 8 and so on after the first: a server may begin with the very weights of the
            first update, which it would pass without having read them.
        num_sequences: How many sequences.
        tolerance: Largest mean difference of the logprobs that passes; null for 0.005 with
            float32 weights and 0.1 with half precision.

    Raises:
        ValueError: a number below its least.
    """

    every: int = 50
    num_sequences: int = 4
    tolerance: float | None = None

    def __post_init__(self) -> None:
        for name in ("every", "num_sequences"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"proof.{name} must be >= 1, got {getattr(self, name)} (weights that nobody "
                    f"looks at may be stale). Set model.engine.init_args.proof.{name}."
                )

        if self.tolerance is not None and not self.tolerance > 0:
            raise UserError(
                f"proof.tolerance must be positive, got {self.tolerance} (no proof would pass). "
                "Set model.engine.init_args.proof.tolerance."
            )

    def is_due(self, num_updates: int) -> bool:
        """At the update after so many."""
        is_early = num_updates < self.every and num_updates.bit_count() == 1
        return is_early or num_updates % self.every == 0


class WeightMismatch(Exception):
    """A server samples from other weights than the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedLogprobs:
    """What a server with the policy's weights must say."""

    sequences: Tensor
    """[K, L] token ids."""
    logprobs: Tensor
    """[K, places, V] of the token after each of the last places, in float32."""
    temperature: float
    tolerance: float

    def cases(self) -> list[tuple[list[int], Tensor]]:
        """(tokens of a prefix, [V] logprobs of what follows it)."""
        length = self.sequences.shape[1]
        return [
            (sequence[: length - NUM_PLACES + 1 + place].tolist(), logprobs[place])
            for sequence, logprobs in zip(self.sequences, self.logprobs, strict=True)
            for place in range(NUM_PLACES)
        ]


@torch.no_grad()
def expect(
    policy: SampledPolicy, proof: Proof, *, temperature: float, dtype: str, max_length: int
) -> ExpectedLogprobs:
    """Run the sequences through the policy, in its own precision whatever the trainer's is; under
    a sharded strategy all ranks must call it."""
    model = policy.model
    vocabulary = model.get_input_embeddings().weight.shape[0]
    vocabulary = min(vocabulary, getattr(model.config, "vocab_size", vocabulary))
    length = min(LONGEST, max_length - SPARE_PLACES)
    drawn = np.random.default_rng(0).integers(vocabulary, size=(proof.num_sequences, length))
    sequences = torch.from_numpy(drawn)
    ids = sequences.to(next(model.parameters()).device)
    with evaluation_mode(model), torch.autocast(ids.device.type, enabled=False):
        output = model(input_ids=ids, use_cache=False, logits_to_keep=NUM_PLACES)
    return ExpectedLogprobs(
        sequences=sequences,
        logprobs=(output.logits.float() / temperature).log_softmax(-1).cpu(),
        temperature=temperature,
        tolerance=TOLERANCES[dtype] if proof.tolerance is None else proof.tolerance,
    )


async def prove(
    api: ServerAPI, endpoint: Endpoint, expected: ExpectedLogprobs, adapter: WeightUpdate | None
) -> float:
    """The mean difference of the server's logprobs from the trainer's.

    Raises:
        WeightMismatch: it is beyond the tolerance.
        RequestRefused, ServerError: there was no answer to compare.
    """

    async def compare(request: Request, logprobs: Tensor) -> list[tuple[float, float]]:
        pairs = {}
        async with aclosing(api.stream(endpoint, request)) as stream:
            async for number, sample in stream:
                if sample.finish_reason is not None:
                    pairs[number] = _both(sample, logprobs)
        return list(pairs.values())

    requests = [
        (part, logprobs)
        for tokens, logprobs in expected.cases()
        for part in api.parts(one_token_each(tokens, NUM_SAMPLES, expected.temperature, adapter))
    ]
    answers = await gather_or_cancel([compare(*one) for one in requests])
    pairs = [pair for answer in answers for pair in answer]
    return check_pairs(pairs, expected, f"the server at {endpoint.url}")


def _both(sample: Sample, logprobs: Tensor) -> tuple[float, float]:
    """The server's and the trainer's logprob of the one token."""
    if not sample.is_whole:
        raise ServerError("a token to compare came without its logprob or its version")
    return sample.logprobs[0], logprobs[sample.token_ids[0]].item()


def check_pairs(
    pairs: Sequence[tuple[float, float]], expected: ExpectedLogprobs, sampler_name: str
) -> float:
    """The mean difference between logprobs of a sampler and the trainer's of the same tokens.

    Raises:
        WeightMismatch: it is beyond the tolerance.
    """
    both = torch.tensor(pairs)
    sampler, trainer = both.mean(0).tolist()
    difference = (both[:, 0] - both[:, 1]).abs().mean().item()
    if not difference <= expected.tolerance:  # a difference that is no number does not pass
        raise WeightMismatch(
            f"{sampler_name} says that it holds the policy's weights and does not: "
            f"its logprobs of {len(pairs)} tokens differ from the trainer's by {difference:.3g} on "
            f"average, where {expected.tolerance:g} is allowed (mean {sampler:.3f}, trainer "
            f"{trainer:.3f}). Training on its rollouts would be training on another policy's. "
            "Known causes: tied embeddings on a CPU, a prefix cache that outlived the update, "
            "another --logprobs-mode or dtype than was configured; for a large difference of "
            "kernels set model.engine.init_args.proof.tolerance."
        )
    return difference
