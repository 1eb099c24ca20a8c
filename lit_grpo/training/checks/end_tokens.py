"""Check that something other than the token limit ends the completions of a training run."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_grpo.objective import Objective
from lit_grpo.policy.chat_template import SET_EOS, end_tokens
from lit_grpo.policy.files.vocabulary import check_stop_tokens
from lit_grpo.rollout import Sampling
from lit_grpo.types import UserError


def check_ends(
    model: Any, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, objective: Objective
) -> str:
    """Return a warning if nothing ends a completion, or only what the tokenizer does not know.

    Args:
        model: Has the ``config`` and ``generation_config`` of `transformers`; the latter may be
            None.

    Raises:
        UserError: nothing ends one, and completions that do not end are left out of the loss; or
            a stop is no token of the model.
    """
    check_stop_tokens(model.config, sampling.stop_token_ids)
    if sampling.stop or sampling.stop_token_ids or tokenizer.eos_token_id is not None:
        return ""
    ends = end_tokens(model, tokenizer)
    if not ends:
        return _without_end(sampling, objective)
    known = tokenizer.added_tokens_decoder
    plain = [one for one in ends if one not in known or not known[one].special]
    if not plain:
        return ""
    tokens = ", ".join(f"{one} ({tokenizer.decode([one])!r})" for one in plain)
    return (
        f"completions end with token {tokens}, the eos_token_id of the model's config; the "
        "tokenizer has no end-of-sequence token, so rewards see it in the text. If it does not "
        "end texts, correct eos_token_id in generation_config.json and config.json of the model; "
        f"if it does, {SET_EOS}"
    )


def _without_end(sampling: Sampling, objective: Objective) -> str:
    nothing = (
        "nothing ends a completion: neither the tokenizer nor the model's config has an "
        "end-of-sequence token, and model.sampling has neither stop nor stop_token_ids"
    )
    if objective.overlong_filtering:
        raise UserError(
            f"{nothing}; with model.objective.overlong_filtering none would be trained on. Set it "
            f"to false; or, to give the tokenizer one, {SET_EOS}"
        )
    return (
        f"{nothing}. Each will have model.sampling.max_tokens ({sampling.max_tokens}) tokens. If "
        f"that is not meant, {SET_EOS}"
    )
