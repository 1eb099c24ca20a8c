"""Find the token with which a tokenizer's chat template ends the assistant's turn."""

from __future__ import annotations

import jinja2

from lit_grpo.types import Tokenizer

PROBE = "lit-grpo-probe"


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
