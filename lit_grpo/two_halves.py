"""A causal model as body and head, so that the head can run over a few tokens at a time.

Knows the few things that models do between hidden states and logits, and refuses the others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel


class TwoHalves:
    """A ``transformers`` causal model as body and head (``logprobs.CausalModel``)."""

    def __init__(self, model: PreTrainedModel, *, compile: bool = False) -> None:
        self._body = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._scale = _logit_scale(model.config)
        self._softcap = getattr(model.config, "final_logit_softcapping", None)
        self._run_body = torch.compile(self._body, dynamic=True) if compile else self._body

    def hidden_states(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """[N, L] ids and mask to [N, L, H]."""
        output = self._run_body(
            input_ids=ids, attention_mask=mask.long(), position_ids=position_ids, use_cache=False
        )
        return output.last_hidden_state

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] to [T, V], scaled and capped as the model does it."""
        logits = self._head(hidden_states) * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def _logit_scale(config: PreTrainedConfig) -> float:
    """Cohere multiplies its logits, Granite divides them."""
    return getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)


@torch.no_grad()
def check_halves(model: PreTrainedModel) -> None:
    """Compare with the model's own logits on a few tokens.

    Raises:
        ValueError: they are not those of its body and head put together.
    """
    was_training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")  # Flash attention wants a GPU and 16 bits
    ids = torch.arange(4)[None] % model.config.get_text_config().vocab_size
    ids = ids.to(next(model.parameters()).device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    parts = TwoHalves(model)
    hidden_states = parts.hidden_states(ids, mask, torch.arange(4, device=ids.device)[None])
    ours = parts.logits(hidden_states).float()
    theirs = model(input_ids=ids).logits.float()
    model.set_attn_implementation(attention)
    model.train(was_training)
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__} does more between its hidden states and its logits than a "
            f"scale and a soft cap (they differ by {(ours - theirs).abs().max():.2g}), so its "
            "logprobs can't be computed in chunks. Use another model, or teach "
            "lit_grpo.two_halves.TwoHalves what this one does."
        )
