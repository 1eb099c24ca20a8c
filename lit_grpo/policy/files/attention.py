"""Explain why an attention implementation cannot be used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from lit_grpo.types import UserError
from lit_grpo.types.spelling import did_you_mean

IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
ABOUT_ATTENTION = re.compile(
    r"attn_implementation|flash.?attention|scaled_dot_product_attention|flex.?attention|kernels",
    re.IGNORECASE,
)
"""Errors of `transformers` that an attention implementation causes."""


@contextmanager
def explained_attention(name: str | None) -> Iterator[None]:
    """Replace the errors that an attention implementation causes with one that names the setting.

    Args:
        name: The implementation; None if `transformers` chooses it.

    Raises:
        UserError: it does not exist, its package is missing, or the model does not support it.
    """
    try:
        yield
    except (ImportError, ValueError) as error:
        if name is None or not ABOUT_ATTENTION.search(str(error)):
            raise
        if isinstance(error, ImportError):
            reason = str(error).split("following error: ")[-1].split(". ")[0].rstrip(".")
            package = "flash-attn" if name == "flash_attention_2" else "its package"
            remedy = f"Install {package}, or set"
        elif " does not support " in str(error):
            reason, remedy = f"{str(error).split(' does not ')[0]} does not support it", "Set"
        else:
            known = f" Known are {', '.join(IMPLEMENTATIONS)}."
            remedy = f"{(did_you_mean(name, IMPLEMENTATIONS) or known).strip()} Set"
            reason = "there is no such implementation"
        raise UserError(
            f"model.policy.attn_implementation: {name} cannot be used: {reason}. {remedy} "
            "model.policy.attn_implementation to null, which lets transformers choose."
        ) from error
