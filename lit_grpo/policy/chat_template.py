"""Find the tokens that end a model's text: its own, and the one that ends an assistant's turn."""

from __future__ import annotations

from typing import Any

import jinja2

from lit_grpo.types.tokenizer import Tokenizer

PROBE = "lit-grpo-probe"
SET_EOS = (
    "set tokenizer.eos_token to the token of its vocabulary that ends a text, write it with "
    "tokenizer.save_pretrained, and set model.policy.tokenizer to that directory."
)
"""Advice for a tokenizer without an end-of-sequence token, as the end of a sentence."""


def end_tokens(model: Any, tokenizer: Tokenizer) -> list[int]:
    """Return the model's end-of-sequence tokens and the chat template's end-of-turn token, sorted.

    Args:
        model: Has the ``generation_config`` of `transformers`, or None there.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, end_of_turn(tokenizer)}
    ids.update(configured if isinstance(configured, list) else [configured])
    return sorted(token for token in ids if token is not None)


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the special token right after the assistant's turn, or None if there is none.

    It may differ from the tokenizer's end-of-sequence token: base models of Qwen end a text with
    ``<|endoftext|>``, and their template ends a turn with ``<|im_end|>``.
    """
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except (jinja2.TemplateError, TypeError, ValueError):
        return None  # a template for conversations of another form
    _, found, rest = text.rpartition(PROBE)
    token_ids = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"] if found else []
    known = tokenizer.added_tokens_decoder
    is_special = bool(token_ids) and token_ids[0] in known and known[token_ids[0]].special
    return int(token_ids[0]) if is_special else None
