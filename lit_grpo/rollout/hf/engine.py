"""Rollouts by the policy's own ``transformers`` model, in this process.

Every prompt is prefilled once; its G rows share its cache, or each has a copy. Finished rows leave
the batch. The host waits for the device once a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_grpo.policy.body_and_head import evaluation_mode
from lit_grpo.policy.padding import pad
from lit_grpo.rollout.engine import RolloutEngine, SampledPolicy, Sampling
from lit_grpo.rollout.hf import shared_prompts
from lit_grpo.rollout.hf.running_batch import RunningBatch, can_prepare_masks, can_share_prompts
from lit_grpo.rollout.requests import completion_text, stop_token_ids
from lit_grpo.types import Completion, Prompt, check_range
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.rollouts import FinishReason


@checks_keywords
class HFEngine(RolloutEngine):
    """Sample from the policy itself, so the weights are never stale.

    Args:
        max_concurrent: Completions sampled at the same time; bounds the key-value cache.

    Raises:
        UserError: ``max_concurrent`` is less than 1.
    """

    samples_with_policy = True

    def __init__(self, max_concurrent: int = 512) -> None:
        check_range(
            "model.engine.init_args.max_concurrent",
            max_concurrent,
            at_least=1,
            why="it is the number of completions sampled together",
        )
        self.max_concurrent = max_concurrent
        self.policy: SampledPolicy | None = None
        self._num_unfinished_tokens = 0

    @property
    def num_unfinished_tokens(self) -> int:
        return self._num_unfinished_tokens

    def load_weights(self, policy: SampledPolicy, version: int) -> None:
        """Keep a reference to the policy; nothing is copied."""
        self.policy = policy
        self.version = version

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        """Sample prompts of similar length together, longest first.

        Each row has its own stream of random numbers, so a completion does not depend on the
        other rows of its batch.
        """
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(
            (len(prompts) * group_size, sampling.max_tokens),
            generator=generator,
            dtype=torch.float32,
        )
        longest_first = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].token_ids))
        wave_size = max(1, self.max_concurrent // group_size)
        policy = self._loaded()
        with evaluation_mode(policy.model):
            for start in range(0, len(prompts), wave_size):
                wave = longest_first[start : start + wave_size]
                rows = [i * group_size + j for i in wave for j in range(group_size)]
                ids = [prompts[i].token_ids for i in wave]
                try:
                    for finished in self._sample(policy, ids, group_size, sampling, noise[rows]):
                        for n, completion in finished:
                            yield rows[n], completion
                finally:
                    torch.clear_autocast_cache()  # before the weights change

    def _loaded(self) -> SampledPolicy:
        """Return the policy that samples.

        Raises:
            RuntimeError: it is not there, or has no weights.
        """
        if self.policy is None or self.policy.model is None:
            raise RuntimeError(
                "HFEngine has no weights to sample with: call policy.load(with_reference=False) "
                "and engine.load_weights(policy, 0) first"
            )
        return self.policy

    @torch.no_grad()
    def _sample(
        self,
        policy: SampledPolicy,
        prompt_ids: list[tuple[int, ...]],
        group_size: int,
        sampling: Sampling,
        noise: Tensor,
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Sample one wave of prompts; yield (row of the wave, completion) of rows that finish."""
        model, tokenizer = policy.model, policy.tokenizer
        ids, mask = pad(prompt_ids, tokenizer.pad_token_id or 0, torch.long, left=True)
        saved_tokens = ids.numel() * (group_size - 1)
        shares_prompts = saved_tokens >= shared_prompts.MIN_SAVED_TOKENS
        shares_prompts = shares_prompts and can_share_prompts(model)
        batch = RunningBatch(
            model,
            ids,
            mask,
            group_size,
            noise,
            shares_prompts=shares_prompts,
            prepares_masks=can_prepare_masks(model),
        )
        stops = _Stops(policy, sampling, batch.logits.device)
        for step in range(sampling.max_tokens):
            self.stop_if_asked()
            logits = batch.logits.float()
            if sampling.temperature not in (0, 1):
                logits = logits / sampling.temperature
            probabilities = allowed = logits.softmax(-1)
            if step < sampling.min_tokens:
                allowed = stops.forbid(logits).softmax(-1)
            tokens = _draw(allowed, sampling, batch.noise[:, step])
            is_stop = stops.contain(tokens)
            ends = batch.append(tokens, _logprobs(logits, probabilities, tokens), is_stop)
            has_stopped = stops.reached(batch, ends, step + 1)
            is_last = step + 1 == sampling.max_tokens
            finished = [index for index, stop in enumerate(has_stopped) if stop or is_last]
            if finished:
                yield [
                    (batch.rows[index], self._completion(batch, index, has_stopped[index], stops))
                    for index in finished
                ]
            self._num_unfinished_tokens = (len(batch.rows) - len(finished)) * (step + 1)
            if len(finished) == len(batch.rows):
                return
            batch.advance(tokens, ~torch.tensor(has_stopped) if finished else None)

    def _completion(
        self, batch: RunningBatch, index: int, has_stopped: bool, stops: _Stops
    ) -> Completion:
        tokens, logprobs = batch.sampled[batch.rows[index]]
        reason: FinishReason = "stop" if has_stopped else "length"
        return Completion(
            token_ids=tuple(tokens),
            sampler_logprobs=tuple(logprobs),
            text=stops.text(tokens),
            finish_reason=reason,
            policy_versions=(self.version,) * len(tokens),
        )


def _draw(probabilities: Tensor, sampling: Sampling, noise: Tensor) -> Tensor:
    """Draw [R] tokens from [R, V] probabilities by inverting the cumulative distribution.

    Probabilities that are NaN draw any token.

    Args:
        noise: [R] uniform numbers in [0, 1).
    """
    if sampling.is_greedy:
        return probabilities.argmax(-1)
    if sampling.top_k:
        kth = probabilities.topk(min(sampling.top_k, probabilities.shape[-1])).values[:, -1:]
        probabilities = probabilities.where(probabilities >= kth, 0.0)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(-1, descending=True)
        # Keep a token while the more likely ones do not reach the mass; the first always stays.
        mass = ordered.cumsum(-1)
        inside = mass - ordered < sampling.top_p * mass[:, -1:]
        probabilities = probabilities.where(inside.gather(-1, order.argsort(-1)), 0.0)
    cumulative = probabilities.cumsum(-1)
    # Clamp below 1 by more than a rounding error, so that a token of probability 0 is never drawn.
    threshold = noise.clamp(max=1 - 2**-20)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    drawn = drawn.clamp(max=probabilities.shape[-1] - 1)  # after the last one if they are NaN
    return drawn if probabilities.is_cpu else _possible(drawn, probabilities)


def _possible(drawn: Tensor, probabilities: Tensor) -> Tensor:
    """Return [R] drawn tokens, with any token of probability 0 replaced by the most likely one.

    The parallel sum of a GPU may decrease by a rounding error, where such a token may be drawn.
    """
    is_impossible = probabilities.gather(-1, drawn[:, None])[:, 0] == 0
    return probabilities.argmax(-1).where(is_impossible, drawn)


def _logprobs(logits: Tensor, probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Return [R] logprobs of the tokens, relative to the most likely one.

    If the most likely token is forbidden, the probability of the drawn one may underflow, and its
    logarithm would be -inf.
    """
    below_top = logits.gather(-1, tokens[:, None])[:, 0] - logits.amax(-1)
    return below_top + probabilities.amax(-1).log()


@dataclass(slots=True)
class _Stops:
    """The tokens and strings that end a completion."""

    policy: SampledPolicy
    sampling: Sampling
    device: torch.device
    token_ids: Tensor = field(init=False)

    def __post_init__(self) -> None:
        ids = torch.tensor(stop_token_ids(self.policy, self.sampling), dtype=torch.long)
        self.token_ids = ids.to(self.device, non_blocking=True)

    def forbid(self, logits: Tensor) -> Tensor:
        """Return the logits with every stop token ruled out."""
        return logits.index_fill(-1, self.token_ids, -torch.inf)

    def contain(self, tokens: Tensor) -> Tensor:
        """Return [R] True on the tokens that end a completion."""
        return (tokens[:, None] == self.token_ids).any(1)  # torch.isin may sort, and wait

    def reached(self, batch: RunningBatch, is_stop: list[bool], num_tokens: int) -> list[bool]:
        """Return which of the running rows end with their last token.

        Args:
            is_stop: Whether it is a stop token.
            num_tokens: Tokens of each row so far.
        """
        if num_tokens < self.sampling.min_tokens:
            return [False] * len(is_stop)
        if not self.sampling.stop:
            return is_stop
        # Every token is at least one byte, so this window contains the longest stop string.
        window = max(len(text.encode()) for text in self.sampling.stop) + 1
        return [
            stops or self._ends_with_stop_string(batch.sampled[row][0], window)
            for row, stops in zip(batch.rows, is_stop, strict=True)
        ]

    def _ends_with_stop_string(self, tokens: list[int], window: int) -> bool:
        tokens_after_min = tokens[self.sampling.min_tokens :]
        tail = self.policy.tokenizer.decode(tokens_after_min[-window:])
        return any(text in tail for text in self.sampling.stop)

    def text(self, tokens: list[int]) -> str:
        return completion_text(self.policy.tokenizer, tokens, self.sampling)
