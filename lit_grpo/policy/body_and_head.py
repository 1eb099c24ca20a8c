"""Run the body and the head of a causal model separately, so that the head can run in chunks.

Models may scale and soft-cap their logits; a model that does more is refused. The body runs packs
where the architecture allows it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lit_grpo.policy.cast_head import cast_linear, cast_weight
from lit_grpo.policy.logprobs import packed_states, padded_states
from lit_grpo.policy.packed.packed_attention import PACKED, using_attention
from lit_grpo.policy.packed.packing import Pack, pack
from lit_grpo.policy.sharding import UNSHARDED, Sharding, T, compute_device
from lit_grpo.types import TokenBatch, UserError

log = logging.getLogger(__name__)


class BodyAndHead:
    """A ``transformers`` causal model as body and head, a ``logprobs.CausalModel``.

    Args:
        use_packing: Run batches as packs, which `runs_packs` and `packs_match_padded` must
            allow.
        compile: Run the body through ``torch.compile``.
        sharding: How the model is sharded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        use_packing: bool = False,
        compile: bool = False,
        sharding: Sharding = UNSHARDED,
    ) -> None:
        self.uses_packing = use_packing
        self.is_compiled = compile
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.is_sharded = sharding.is_sharded
        self._model, self._sharding = model, sharding
        untyped: Any = model  # transformers does not annotate the two getters
        self._body: PreTrainedModel = untyped.get_decoder()
        self._head: nn.Module = untyped.get_output_embeddings()
        self._run_head: Any = self._head.forward  # its hooks run in `with_head`
        self._scale = _logit_scale(model.config)
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._run_body: Any = sharding.compiled(self._body) if compile else self._body

    def run(self, function: Callable[[], T]) -> T:
        return self._sharding.run(self._model, function)

    def hidden_states(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """Return [N, L, H] for padded rows [N, L]."""
        device = compute_device(self._body)
        hidden_states: Tensor = self._run_body(
            input_ids=ids.to(device, non_blocking=True),
            attention_mask=mask.long().to(device, non_blocking=True),
            position_ids=position_ids.to(device, non_blocking=True),
            use_cache=False,
        ).last_hidden_state
        return hidden_states

    def packed_hidden_states(self, pack: Pack) -> Tensor:
        """Return [T, H] for the tokens of a pack."""
        pack = pack.to(compute_device(self._body))
        with using_attention(self._body.config, PACKED):
            hidden_states: Tensor = self._run_body(
                input_ids=pack.ids,
                attention_mask=torch.ones_like(pack.ids),
                position_ids=pack.position_ids,
                use_cache=False,
                layout=pack.layout,
            ).last_hidden_state
        return hidden_states[0]

    def with_head(self, function: Callable[[Tensor], T], hidden_states: Tensor) -> T:
        """Call a function that uses the head, whose weights a sharding collects once for it."""
        return self._sharding.run_part(self._head, function, hidden_states)

    def cast_head(self) -> Tensor | None:
        """Return the weight that `logits` may be given, see `cast_weight`."""
        return cast_weight(self._head)

    def logits(self, hidden_states: Tensor, cast: Tensor | None = None) -> Tensor:
        """Return [T, V] for [T, H], scaled and soft-capped like the model's own logits."""
        if cast is None:
            logits: Tensor = self._run_head(hidden_states)
        else:
            logits = cast_linear(hidden_states, self._head, cast)
        if self._scale != 1:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def num_compilations() -> int:
    """Return how many graphs ``torch.compile`` has built in this process so far.

    The number should stop growing after the first steps.
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _logit_scale(config: PreTrainedConfig) -> float:
    """Return the factor on the logits: Cohere's config multiplies, Granite's divides them."""
    return float(getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0))


@torch.no_grad()
def check_body_and_head(model: PreTrainedModel, sharding: Sharding = UNSHARDED) -> None:
    """Check on a few tokens that body and head together give the model's own logits.

    Every rank of a sharded model must call this.

    Raises:
        UserError: the logits differ.
    """
    ids = torch.arange(4)[None] % model.config.get_text_config().vocab_size
    ids = ids.to(compute_device(model))
    mask = torch.ones_like(ids, dtype=torch.bool)
    body_and_head = BodyAndHead(model, sharding=sharding)

    def logits() -> Tensor:
        position_ids = torch.arange(4, device=ids.device)[None]
        return body_and_head.logits(body_and_head.hidden_states(ids, mask, position_ids))

    with _eager_evaluation(model):
        ours = body_and_head.run(logits).float()
        theirs = body_and_head.run(lambda: model.forward(input_ids=ids).logits).float()
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2):
        raise UserError(
            f"{type(model).__name__} does more between its hidden states and its logits than a "
            f"scale and a soft cap (the logits differ by {(ours - theirs).abs().max():.2g}), so "
            "its logprobs cannot be computed in chunks. Use a different model, or extend "
            "lit_grpo.policy.body_and_head.BodyAndHead."
        )


@contextmanager
def _eager_evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode with eager attention.

    Flash attention needs a GPU and 16 bits, and a model that is being loaded may have neither.
    """
    with evaluation_mode(model), using_attention(model.config, "eager"):
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back into its previous mode afterwards.

    In training mode, gradient checkpointing turns the key-value cache off.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


TF32_EPS = 2**-10

_PLAIN_LAYERS = {"full_attention", "sliding_attention"}


def runs_packs(model: PreTrainedModel) -> bool:
    """Return whether the body of a model takes packs, whatever its weights; else log a warning."""
    return not _warn_of(structural_obstacle(model), model)


def packs_match_padded(model: PreTrainedModel, sharding: Sharding = UNSHARDED) -> bool:
    """Return whether packs have the hidden states of padded rows; if not, log a warning.

    Every rank of a sharded model must call this.
    """
    return not _warn_of(numerical_obstacle(model, sharding), model)


def _warn_of(obstacle: str | None, model: PreTrainedModel) -> bool:
    """Log why a model cannot run packs; return whether there is a reason."""
    if obstacle is not None:
        log.warning(
            "%s cannot run packed sequences (%s). Every completion is run padded, with its own "
            "copy of the prompt, which is slower.",
            type(model).__name__,
            obstacle,
        )
    return obstacle is not None


@torch.no_grad()
def structural_obstacle(model: PreTrainedModel) -> str | None:
    """Return why this model does not take packs, or None if it does, tested on three short rows.

    Raises:
        UserError: the test fails for a reason that says nothing about packs.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if others := kinds - _PLAIN_LAYERS:
        return f"it has {' and '.join(sorted(others))} layers"
    body_and_head = BodyAndHead(model)
    packed = pack(_short_batch(body_and_head.vocab_size))
    try:
        with _eager_evaluation(model):
            _check_runs_packed_attention(body_and_head, packed)
            body_and_head.packed_hidden_states(packed)
    except NotImplementedError as error:
        return str(error)
    except Exception as error:
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            return f"it does not take what its attention needs: {error}"
        raise UserError(
            f"packing must be possible or refused for a known reason, but {type(model).__name__} "
            f"failed with {type(error).__name__}: {error}. Please report this, and set "
            "model.policy.packing to false to run every completion padded."
        ) from error
    return None


@torch.no_grad()
def numerical_obstacle(model: PreTrainedModel, sharding: Sharding = UNSHARDED) -> str | None:
    """Return how the hidden states of a pack differ from padded rows'; None if equal."""
    body_and_head = BodyAndHead(model, sharding=sharding)
    batch = _short_batch(body_and_head.vocab_size)
    with _eager_evaluation(model):
        states, predictors = body_and_head.run(partial(packed_states, body_and_head, batch))
        packed = states[predictors]
        states, predictors = body_and_head.run(partial(padded_states, body_and_head, batch))
        padded = states[predictors]
    difference = float((packed.float() - padded.float()).norm() / padded.float().norm())
    # Shards in float32 may be gathered in bfloat16, and a GPU may multiply float32 as TF32.
    eps = torch.finfo(packed.dtype).eps
    eps = max(eps, TF32_EPS) if packed.device.type == "cuda" else eps
    if not difference < eps**0.5:
        return f"its hidden states differ by {difference:.1g}"
    return None


def _check_runs_packed_attention(model: BodyAndHead, pack: Pack) -> None:
    """Check that the model calls `packed_attention`, which raises for a layout without blocks.

    A model that ignores the choice runs its own attention. In 16 bits the difference in the hidden
    states may be too small to show this.
    """
    try:
        model.packed_hidden_states(pack._replace(layout=pack.layout._replace(blocks=())))
    except NotImplementedError:
        return
    raise NotImplementedError("its attention cannot be chosen through transformers")


def _short_batch(vocabulary: int) -> TokenBatch:
    """Return two prompts; the first one has two completions with the same first token."""
    with torch.device("cpu"):  # while a model is loaded, Lightning makes its device the default
        prompts = torch.tensor([[1, 2, 3], [0, 4, 5]])
        completions = torch.tensor([[6, 7, 8, 9], [6, 1, 0, 0], [2, 3, 4, 0]])
        prompt_index = torch.tensor([0, 0, 1])
    return TokenBatch(
        prompt_ids=prompts % vocabulary,
        prompt_mask=prompts > 0,
        prompt_index=prompt_index,
        completion_ids=completions % vocabulary,
        completion_mask=completions > 0,
    )
