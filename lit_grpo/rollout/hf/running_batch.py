"""The rows that are sampled together: what they have sampled, their cache and their next logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from lit_grpo.policy.named_weights import unwrap_peft
from lit_grpo.policy.packed.packed_attention import using_attention
from lit_grpo.policy.padding import positions
from lit_grpo.policy.sharding import compute_device
from lit_grpo.rollout.hf.blocked_weights import BlockedWeights
from lit_grpo.rollout.hf.row_cache import RowCache, cache_name, can_join, join_caches
from lit_grpo.rollout.hf.shared_prompts import SHARED, SharedPrompts
from lit_grpo.types.errors import Diverged

log = logging.getLogger(__name__)

PREFILL_TOKENS = 2**15
"""Tokens of prompts that are read in one forward pass, which has at least one whole prompt; more
would only need more memory."""


def prompts_at_once(length: int) -> int:
    """Return how many prompts, padded to so many tokens, are read in one forward pass."""
    return max(1, PREFILL_TOKENS // length)


def _prefill(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, DynamicCache]:
    """Return [B, V] next logits and the cache of [B, P] prompts, which are read some at a time.

    If the layers of the model keep states other than keys and values, it reads them together.
    """
    num_rows = prompts_at_once(ids.shape[1])
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


class RunningBatch:
    """The unfinished rows of a wave, their cache and their next logits.

    Args:
        ids: [B, P] prompts, on the CPU.
        mask: [B, P] True on their tokens.
        noise: [B * G, max_tokens] a random number for each token of each row, on the CPU.
        shares_prompts: Whether the rows of a group share their prompt, see `can_share_prompts`;
            otherwise each has a copy.
        prepares_masks: Whether layers of plain attention get the mask in the shape that they need,
            see `can_prepare_masks`; otherwise ``transformers`` brings it into that shape.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ids: Tensor,
        mask: Tensor,
        group_size: int,
        noise: Tensor,
        *,
        shares_prompts: bool = False,
        prepares_masks: bool = False,
    ) -> None:
        device = compute_device(model)
        self._model = model
        self._weights = BlockedWeights(model, noise.shape[1])
        is_padded = not mask.all()
        mask = mask.to(device, non_blocking=True)
        with _casts_kept(), self._weights.used():
            logits, prefilled = _prefill(model, ids.to(device, non_blocking=True), mask)
        origin = torch.arange(len(ids), device=device).repeat_interleave(group_size)
        prompts = SharedPrompts(mask if is_padded else None, origin) if shares_prompts else None
        self._cache = RowCache(prefilled, origin, noise.shape[1], prompts)
        self._arguments: dict[str, Any] = {cache_name(model): self._cache.cache}
        if prompts is not None:
            self._arguments["prompts"] = prompts
        needs_mask = is_padded and not (shares_prompts and self._cache.is_plain)
        self._mask = mask[origin] if needs_mask else None
        self._prepares_masks = prepares_masks and self._cache.is_plain
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
        with _casts_kept(), self._attention(), self._weights.used():
            output = self._model(
                input_ids=tokens[:, None],
                attention_mask=self._mask_of_new_tokens(),
                position_ids=self._positions[:, None],
                use_cache=True,
                logits_to_keep=1,
                **self._arguments,
            )
        self._positions = self._positions + 1
        self.logits = output.logits[:, -1]

    def _mask_of_new_tokens(self) -> Tensor | None:
        """Return which tokens the new ones see, [R, L] or [R, 1, 1, L]; None if they see all."""
        if self._mask is None:
            return None
        return self._mask[:, None, None] if self._prepares_masks else self._mask.long()

    def _attention(self) -> AbstractContextManager[None]:
        """Return the context in which the model reads prompts that are shared."""
        if "prompts" not in self._arguments:
            return nullcontext()
        return using_attention(_decoder_config(self._model), SHARED)


def can_share_prompts(model: torch.nn.Module) -> bool:
    """Return whether the rows of a group can share their prompt instead of each having a copy.

    They can if torch's attention runs on a CPU and sharing gives the same logits as copies.
    """
    if compute_device(model).type != "cpu":
        return False
    return _takes(model, "shares_prompts", "every completion gets a copy of its prompt's cache")


def can_prepare_masks(model: torch.nn.Module) -> bool:
    """Return whether a model takes masks in the shape that its attention needs.

    ``transformers`` looks into a mask of another shape, for which the host waits once a token. On a
    CPU there is nothing to wait for.
    """
    if compute_device(model).type == "cpu":
        return False
    return _takes(model, "prepares_masks", "the host waits for the mask of each token")


def _takes(model: torch.nn.Module, option: str, otherwise: str) -> bool:
    """Return whether an option of `RunningBatch` leaves the logits of a model as they are.

    Each model is tried once, on two short prompts.

    Args:
        otherwise: What happens without the option, for the log.
    """
    if _decoder_config(model)._attn_implementation != "sdpa":
        return False
    tried = _TRIED.setdefault(model, {})
    if option not in tried:
        obstacle = _obstacle(model, option)
        if obstacle is not None:
            log.info("%s (%s)", otherwise, obstacle)
        tried[option] = obstacle is None
    return tried[option]


_TRIED: WeakKeyDictionary[torch.nn.Module, dict[str, bool]] = WeakKeyDictionary()


def _obstacle(model: torch.nn.Module, option: str) -> str | None:
    """Return why a model does not take an option; None if its logits are right two tokens later."""
    ids = torch.tensor([[1, 2, 3], [0, 4, 5]])
    tokens = torch.tensor([[6, 7, 8, 9], [7, 6, 9, 8]]).to(compute_device(model))
    logits, noise = [], torch.zeros(4, 2)
    for is_on in (False, True):
        try:
            batch = RunningBatch(model, ids, ids > 0, 2, noise, **{option: is_on})
            for sampled in tokens % batch.logits.shape[1]:
                batch.advance(sampled, None)
        except Exception as error:  # a model's own code may raise any
            return f"{type(error).__name__}: {error}"
        logits.append(batch.logits)
    without, with_option = logits
    difference = float((with_option - without).float().norm() / without.float().norm())
    is_right = difference < torch.finfo(without.dtype).eps ** 0.5
    return None if is_right else f"its logits differ by {difference:.1g}"


def _decoder_config(model: torch.nn.Module) -> PreTrainedConfig:
    """Return the config from which the layers of a model read which attention to run."""
    untyped: Any = unwrap_peft(model)
    config: PreTrainedConfig = untyped.get_decoder().config
    return config


@contextmanager
def _casts_kept() -> Iterator[None]:
    """Let autocast keep its cast weights for the next token, which Lightning turns off.

    Outside of autocast this has no effect. Only here may they be kept: a forward pass that needs a
    gradient must cast again.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def _check_finite(logprobs: Iterable[float]) -> None:
    if not all(map(math.isfinite, logprobs)):
        raise Diverged(
            "the policy's logits are not finite while sampling: its weights are NaN or infinite. "
            "Resuming goes on from the newest checkpoint with finite weights; lower the learning "
            "rate or model.update.max_grad_norm."
        )
