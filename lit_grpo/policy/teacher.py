"""The teacher of on-policy distillation: a frozen model that reads the policy's completions."""

from __future__ import annotations

from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from lit_grpo.policy.body_and_head import BodyAndHead, check_body_and_head, supports_packing
from lit_grpo.policy.loading import load_model, load_tokenizer
from lit_grpo.policy.policy import Policy
from lit_grpo.types import UserError

_KEY = "model.teacher.path"
_PROBE = "Wave 12 + 34: naïve façades,\n\tthen 5.6e-7 of them?"


class Teacher:
    """A language model whose distribution the policy is drawn to.

    It must have the policy's vocabulary. Checkpoints do not contain it: a resumed run reads it from
    its path again.

    Args:
        path: Directory or hub id of the model.
        dtype: Data type of the weights. ``bfloat16`` halves the memory.
        trust_remote_code: Run the model code that comes with a hub model.
    """

    def __init__(
        self,
        path: str,
        dtype: Literal["float32", "bfloat16"] = "float32",
        trust_remote_code: bool = False,
    ) -> None:
        self.path = path
        self.dtype = dtype
        self.trust_remote_code = trust_remote_code
        self.model: Any = None

    def load(self, policy: Policy) -> None:
        """Load the model for a policy that is loaded; later calls do nothing.

        Raises:
            UserError: the model cannot be loaded, its head is not supported, or it has a different
                vocabulary from the policy.
        """
        if self.model is not None:
            return
        tokenizer = load_tokenizer(self.path, trust_remote_code=self.trust_remote_code, key=_KEY)
        _check_tokenizer(tokenizer, policy.tokenizer)
        model = load_model(
            self.path,
            dtype=self.dtype,
            attn_implementation=None,
            trust_remote_code=self.trust_remote_code,
            key=_KEY,
        )
        check_body_and_head(model)
        use_packing = policy.packing and supports_packing(model)
        causal_model = BodyAndHead(model, use_packing=use_packing)
        needed = policy.causal_model.vocab_size
        if causal_model.vocab_size < needed:
            raise UserError(
                f"the teacher must have logits for each of the policy's {needed} tokens, got "
                f"{causal_model.vocab_size} (the policy may sample any of them). Set {_KEY} to a "
                "model of the same family."
            )
        self.model, self.causal_model = model.requires_grad_(False), causal_model


def _check_tokenizer(teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Check that both tokenizers give a text the same ids.

    The teacher may have further tokens, as models of one family do.

    Raises:
        UserError: they do not.
    """
    known = teacher.get_vocab()
    ours, theirs = (one(_PROBE, add_special_tokens=False)["input_ids"] for one in (policy, teacher))
    differing = [token for token, id in policy.get_vocab().items() if known.get(token) != id]
    if differing:
        difference = f"in which {len(differing)} tokens differ, such as {differing[0]!r}"
    elif ours != theirs:
        difference = f"that splits {_PROBE!r} differently"
    else:
        return
    raise UserError(
        f"the teacher must have the policy's tokenizer, got one {difference} (it reads the ids of "
        f"the policy's tokens). Set {_KEY} to a model of the same family as the policy."
    )
