"""What ends a completion, and the text that is left of one; the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.rollout.engine import SampledPolicy, Sampling
from lit_grpo.types import Tokenizer


def stop_token_ids(policy: SampledPolicy, sampling: Sampling) -> list[int]:
    """The model's end-of-sequence tokens and the user's, in order."""
    configured = getattr(policy.model.generation_config, "eos_token_id", None)
    ids = {policy.tokenizer.eos_token_id, *sampling.stop_token_ids}
    ids.update(configured if isinstance(configured, list) else [configured])
    return sorted(token for token in ids if token is not None)


def completion_text(tokenizer: Tokenizer, token_ids: Sequence[int], sampling: Sampling) -> str:
    """The text of a completion, up to the first stop string that counts."""
    tokens = list(token_ids)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if not sampling.stop:
        return text
    uncounted = tokenizer.decode(tokens[: sampling.min_tokens], skip_special_tokens=True)
    first = len(uncounted)
    found = [place for stop in sampling.stop if (place := text.find(stop, first)) >= 0]
    return text[: min(found)] if found else text
