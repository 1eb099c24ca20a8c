"""Rollouts by the policy's own ``transformers`` model, in this process.

Every prompt is prefilled once and its cache repeated G times; finished rows leave the batch. The
host waits for the device once a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from lit_grpo.policy.body_and_head import evaluation_mode
from lit_grpo.policy.padding import pad, positions
from lit_grpo.policy.sharding import compute_device
from lit_grpo.rollout.engine import RolloutEngine, SampledPolicy, Sampling
from lit_grpo.rollout.hf.row_cache import RowCache, cache_name, can_join, join_caches
from lit_grpo.rollout.requests import completion_text, stop_token_ids
from lit_grpo.types import Completion, Diverged, FinishReason, Prompt, check_range

PREFILL_TOKENS = 2**15
"""Tokens of prompts that are read in one forward pass; more would only need more memory."""


class HFEngine(RolloutEngine):
    """Sample from the policy itself, so that its weights are never stale.

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

    def load_weights(self, policy: SampledPolicy, version: int) -> None:
        """Keep a reference to the policy; nothing is copied."""
        self.policy = policy
        self.version = version

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        """Sample prompts of similar length together, longest first.

        Each row has its own stream of random numbers, so that a completion does not depend on the
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
        with evaluation_mode(self.policy.model):
            for start in range(0, len(prompts), wave_size):
                wave = longest_first[start : start + wave_size]
                rows = [i * group_size + j for i in wave for j in range(group_size)]
                ids = [prompts[i].token_ids for i in wave]
                try:
                    for n, completion in self._sample(ids, group_size, sampling, noise[rows]):
                        yield rows[n], completion
                finally:
                    torch.clear_autocast_cache()  # before the weights change

    def _sample(
        self, prompt_ids: list[tuple[int, ...]], group_size: int, sampling: Sampling, noise: Tensor
    ) -> Iterator[tuple[int, Completion]]:
        """Sample one wave of prompts; yield (row of the wave, completion)."""
        model, tokenizer = self.policy.model, self.policy.tokenizer
        ids, mask = pad(prompt_ids, tokenizer.pad_token_id or 0, torch.long, left=True)
        batch = _RunningBatch(model, ids, mask, group_size, noise)
        stops = _Stops(self.policy, sampling, batch.logits.device)
        for step in range(sampling.max_tokens):
            self.leave_if_asked()
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
            for index in finished:
                reason: FinishReason = "stop" if has_stopped[index] else "length"
                yield batch.rows[index], self._completion(batch, index, reason, stops)
            self.num_unfinished_tokens = (len(batch.rows) - len(finished)) * (step + 1)
            if len(finished) == len(batch.rows):
                return
            batch.advance(tokens, ~torch.tensor(has_stopped) if finished else None)

    def _completion(
        self, batch: _RunningBatch, index: int, reason: FinishReason, stops: _Stops
    ) -> Completion:
        tokens, logprobs = batch.sampled[batch.rows[index]]
        return Completion(
            token_ids=tuple(tokens),
            sampler_logprobs=tuple(logprobs),
            text=stops.text(tokens),
            finish_reason=reason,
            policy_versions=(self.version,) * len(tokens),
        )


def _prefill(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, DynamicCache]:
    """Return [B, V] next logits and the cache of [B, P] prompts, which are read some at a time.

    Those of a model whose layers keep other states than keys and values are read together.
    """
    num_rows = max(1, PREFILL_TOKENS // ids.shape[1])
    logits, cache = _read(model, ids[:num_rows], mask[:num_rows])
    if len(ids) <= num_rows:
        return logits, cache
    if not can_join(cache):
        return _read(model, ids, mask)
    rest = (torch.split(one[num_rows:], num_rows) for one in (ids, mask))
    others = [_read(model, *part) for part in zip(*rest, strict=True)]
    joined = join_caches([cache, *(one for _, one in others)])
    return torch.cat([logits, *(one for one, _ in others)]), joined


def _read(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, DynamicCache]:
    output = model(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=positions(mask),
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1], getattr(output, cache_name(model))


class _RunningBatch:
    """The unfinished rows of a wave, their cache and their next logits.

    Args:
        ids: [B, P] prompts, on the CPU.
        mask: [B, P] True on their tokens.
        noise: [B * G, max_tokens] a random number for each token of each row, on the CPU.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ids: Tensor,
        mask: Tensor,
        group_size: int,
        noise: Tensor,
    ) -> None:
        device = compute_device(model)
        self._model, self._cache_name = model, cache_name(model)
        is_padded = not mask.all()
        mask = mask.to(device, non_blocking=True)
        with _casts_kept():
            logits, prefilled = _prefill(model, ids.to(device, non_blocking=True), mask)
        origin = torch.arange(len(ids), device=device).repeat_interleave(group_size)
        self._cache = RowCache(prefilled, origin, noise.shape[1])
        self._mask = mask[origin] if is_padded else None
        self._positions = mask.sum(1)[origin]
        self.logits: Tensor = logits[origin]
        """[running rows, V]"""
        self.noise = noise.to(device, non_blocking=True)
        """[running rows, max_tokens]"""
        self.rows = list(range(len(self.logits)))
        """Index in the wave of each running row."""
        self.sampled: list[tuple[list[int], list[float]]] = [([], []) for _ in self.rows]
        """Tokens and logprobs so far of every row of the wave."""

    def append(self, tokens: Tensor, logprobs: Tensor, is_stop: Tensor) -> list[bool]:
        """Append [R] tokens to the rows; return which of them are stop tokens.

        All three are copied from the device at once. Float64 holds every token id exactly.

        Raises:
            Diverged: a logprob is not finite.
        """
        read = torch.stack([tokens.double(), logprobs.double(), is_stop.double()], 1).tolist()
        _check_finite(logprob for _, logprob, _ in read)
        for row, (token, logprob, _) in zip(self.rows, read, strict=True):
            self.sampled[row][0].append(int(token))
            self.sampled[row][1].append(logprob)
        return [bool(stops) for _, _, stops in read]

    def advance(self, tokens: Tensor, keep: Tensor | None) -> None:
        """Run the model on the new tokens of the rows to keep, or of all, and drop the others.

        Args:
            keep: [R] True on the rows to keep, on the CPU; None for all.
        """
        if keep is not None:
            on_host = self._cache.drop(keep, tokens.device)
            self.rows = [self.rows[index] for index in on_host.tolist()]
            kept = on_host.to(tokens.device, non_blocking=True)
            tokens, self._positions = tokens[kept], self._positions[kept]
            self._mask = None if self._mask is None else self._mask[kept]
            self.noise = self.noise[kept]
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        with _casts_kept():
            output = self._model(
                input_ids=tokens[:, None],
                attention_mask=None if self._mask is None else self._mask.long(),
                position_ids=self._positions[:, None],
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: self._cache.cache},
            )
        self._positions = self._positions + 1
        self.logits = output.logits[:, -1]


@contextmanager
def _casts_kept() -> Iterator[None]:
    """Keep the weights that autocast has cast for the next token, which Lightning turns off.

    Outside of autocast this has no effect. Only here may they be kept: a forward pass that needs a
    gradient must cast again.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


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
    return drawn.clamp(max=probabilities.shape[-1] - 1)  # after the last one if they are NaN


def _logprobs(logits: Tensor, probabilities: Tensor, tokens: Tensor) -> Tensor:
    """Return [R] logprobs of the tokens, relative to the most likely one.

    If the most likely token is forbidden, the probability of the drawn one may underflow, and its
    logarithm would be -inf.
    """
    below_top = logits.gather(-1, tokens[:, None])[:, 0] - logits.amax(-1)
    return below_top + probabilities.amax(-1).log()


def _check_finite(logprobs: Iterable[float]) -> None:
    if not all(map(math.isfinite, logprobs)):
        raise Diverged(
            "the policy's logits are not finite while sampling: its weights are NaN or infinite. "
            "Resuming goes on from the newest checkpoint with finite weights; lower the learning "
            "rate or model.update.max_grad_norm."
        )


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

    def reached(self, batch: _RunningBatch, is_stop: list[bool], num_tokens: int) -> list[bool]:
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
