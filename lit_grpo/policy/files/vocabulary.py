"""Check that a model has an embedding for every token that it may get."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lit_grpo.types import Prompt, UserError

OTHER_TOKENIZER = (
    "Set model.policy.tokenizer to the one that the model was trained with, or give the model an "
    "embedding for every token: model.resize_token_embeddings(len(tokenizer)) and save_pretrained."
)


def check_special_tokens(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, advice: str = OTHER_TOKENIZER
) -> None:
    """Check that a model has embeddings for the tokens that begin, end and pad a text.

    Args:
        advice: What to set otherwise.

    Raises:
        UserError: it lacks one.
    """
    special = {
        tokenizer.bos_token: tokenizer.bos_token_id,
        tokenizer.eos_token: tokenizer.eos_token_id,
        tokenizer.pad_token: tokenizer.pad_token_id,
    }
    _refuse({repr(name): id for name, id in special.items() if id is not None}, config, advice)


def check_prompt_tokens(config: PreTrainedConfig, prompts: Sequence[Prompt]) -> None:
    """Check that a model has an embedding for each token of the prompts.

    Raises:
        UserError: it lacks some.
    """
    last = {f"prompt {one.id}": max(one.token_ids) for one in prompts if one.token_ids}
    _refuse(last, config, OTHER_TOKENIZER)


def check_stop_tokens(config: PreTrainedConfig, stop_token_ids: Sequence[int]) -> None:
    """Check that a model can sample each token that is to end a completion.

    Raises:
        UserError: it cannot sample one.
    """
    size: int = config.get_text_config().vocab_size
    unknown = [id for id in stop_token_ids if not 0 <= id < size]
    if unknown:
        raise UserError(
            f"model.sampling.stop_token_ids must be tokens of the model, 0 to {size - 1}, got "
            f"{unknown[0]}, which it never samples: no completion would end there. Correct or "
            "remove it; tokenizer.convert_tokens_to_ids(text) gives the id of a token."
        )


def _refuse(tokens: dict[str, int], config: PreTrainedConfig, advice: str) -> None:
    size: int = config.get_text_config().vocab_size
    missing = [f"token {id} ({what})" for what, id in tokens.items() if id >= size]
    if missing:
        raise UserError(
            f"the model must have an embedding for every token, got {size:,} embeddings, for the "
            f"tokens 0 to {size - 1}, and {missing[0]}. {advice}"
        )
