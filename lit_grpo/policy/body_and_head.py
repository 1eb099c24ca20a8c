"""A causal model as body and head, so that the head can run over a few tokens at a time.

Knows the few things that models do between hidden states and logits, and refuses the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from lit_grpo.policy.logprobs import packed_states, padded_states
from lit_grpo.policy.packed_attention import PACKED, using_attention
from lit_grpo.policy.packing import Pack, pack
from lit_grpo.types import TrainBatch, UserError

log = logging.getLogger(__name__)


class BodyAndHead:
    """A ``transformers`` causal model as body and head (``logprobs.CausalModel``).

    Args:
        packs: The body can run packs (``runs_packs``).
        compile: Run it through ``torch.compile``.
    """

    def __init__(
        self, model: PreTrainedModel, *, packs: bool = False, compile: bool = False
    ) -> None:
        self.packs = packs
        self.is_compiled = compile
        self.vocab_size = model.config.get_text_config().vocab_size
        self._body = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._scale = _logit_scale(model.config)
        self._softcap = getattr(model.config, "final_logit_softcapping", None)
        self._run_body = torch.compile(self._body, dynamic=True) if compile else self._body

    def hidden_states(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """[N, L] ids and mask to [N, L, H]."""
        device = self._body.device
        output = self._run_body(
            input_ids=ids.to(device),
            attention_mask=mask.long().to(device),
            position_ids=position_ids.to(device),
            use_cache=False,
        )
        return output.last_hidden_state

    def packed_hidden_states(self, pack: Pack) -> Tensor:
        """[T, H] of the tokens of a pack."""
        pack = pack.to(self._body.device)
        with using_attention(self._body.config, PACKED):
            output = self._run_body(
                input_ids=pack.ids,
                attention_mask=torch.ones_like(pack.ids),
                position_ids=pack.position_ids,
                use_cache=False,
                layout=pack.layout,
            )
        return output.last_hidden_state[0]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] to [T, V], scaled and capped as the model does it."""
        logits = self._head(hidden_states) * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def num_compilations() -> int:
    """Graphs that ``torch.compile`` has made in this process so far: it should stop growing after
    the first steps."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _logit_scale(config: PreTrainedConfig) -> float:
    """Cohere multiplies its logits, Granite divides them."""
    return getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)


@torch.no_grad()
def check_body_and_head(model: PreTrainedModel) -> None:
    """Compare with the model's own logits on a few tokens.

    Raises:
        ValueError: they are not those of its body and head put together.
    """
    ids = torch.arange(4)[None] % model.config.get_text_config().vocab_size
    ids = ids.to(next(model.parameters()).device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    parts = BodyAndHead(model)
    with _tried(model):
        hidden_states = parts.hidden_states(ids, mask, torch.arange(4, device=ids.device)[None])
        ours = parts.logits(hidden_states).float()
        theirs = model(input_ids=ids).logits.float()
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2):
        raise UserError(
            f"{type(model).__name__} does more between its hidden states and its logits than a "
            f"scale and a soft cap (they differ by {(ours - theirs).abs().max():.2g}), so its "
            "logprobs can't be computed in chunks. Use another model, or teach "
            "lit_grpo.policy.body_and_head.BodyAndHead what this one does."
        )


@contextmanager
def _tried(model: PreTrainedModel) -> Iterator[None]:
    """Flash attention wants a GPU and 16 bits, which a model that is being loaded need not have."""
    with evaluation_mode(model), using_attention(model.config, "eager"):
        yield


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, then back into the mode that it was in.

    Training mode switches the key-value cache off under gradient checkpointing.
    """
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def runs_packs(model: PreTrainedModel) -> bool:
    """Whether a body can run packs; where it can't, the log says why."""
    obstacle = packing_obstacle(model)
    if obstacle is not None:
        log.warning(
            "%s runs every prompt once a completion, padded, not once a group: %s.",
            type(model).__name__,
            obstacle,
        )
    return obstacle is None


_PLAIN_LAYERS = {"full_attention", "sliding_attention"}


@torch.no_grad()
def packing_obstacle(model: PreTrainedModel) -> str | None:
    """Why this model can't run packs, None where it can; tried on three short rows."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if others := kinds - _PLAIN_LAYERS:
        return f"it has layers of {' and '.join(sorted(others))}"
    try:
        with _tried(model):
            difference = _packing_difference(model)
    except Exception as error:  # whatever it is, such a model runs padded
        return f"{type(error).__name__}: {error}"
    if not difference < torch.finfo(model.dtype).eps ** 0.5:
        return f"its hidden states differ by {difference:.1g}"
    return None


def _packing_difference(model: PreTrainedModel) -> float:
    """How far, relatively, a pack's hidden states are from those of padded rows."""
    parts = BodyAndHead(model)
    batch = _short_rows(model.config.get_text_config().vocab_size).to(model.device)
    _check_attention_is_ours(parts, pack(batch))
    ours, theirs = (
        hidden_states[predictors].float()
        for hidden_states, predictors in (packed_states(parts, batch), padded_states(parts, batch))
    )
    return float((ours - theirs).norm() / theirs.norm())


def _check_attention_is_ours(parts: BodyAndHead, pack: Pack) -> None:
    """Ours wants blocks; where they are not missed, the model runs its own attention, and what that
    changes may be too little to be seen in 16 bits."""
    try:
        parts.packed_hidden_states(pack._replace(layout=pack.layout._replace(blocks=())))
    except NotImplementedError:
        return
    raise NotImplementedError("its attention is none that transformers lets one choose")


def _short_rows(vocabulary: int) -> TrainBatch:
    """Two prompts; the first has two completions, which begin alike."""
    prompts = torch.tensor([[1, 2, 3], [0, 4, 5]])
    completions = torch.tensor([[6, 7, 8, 9], [6, 1, 0, 0], [2, 3, 4, 0]])
    mask = completions > 0
    return TrainBatch(
        prompt_ids=prompts % vocabulary,
        prompt_mask=prompts > 0,
        prompt_index=torch.tensor([0, 0, 1]),
        completion_ids=completions % vocabulary,
        completion_mask=mask,
        loss_mask=mask,
        advantages=torch.zeros(3),
        sampler_logprobs=torch.zeros(mask.shape),
    )
