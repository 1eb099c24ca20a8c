"""The end of a turn is read from the chat template."""

import pytest
from chat_models import ALWAYS_THINKS, IM_END, TEMPLATE, qwen_tokenizer

from lit_grpo.policy.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from lit_grpo.policy.chat_template import end_of_turn

LIKE_LLAMA_2 = "{{ messages[0]['content'] }} {{ messages[1]['content'] }} {{ eos_token }}"


@pytest.mark.parametrize("template", [TEMPLATE, ALWAYS_THINKS, {"default": TEMPLATE}], ids=str)
def test_the_end_of_a_turn_may_differ_from_the_end_of_the_text(template):
    tokenizer = qwen_tokenizer(template)
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids(IM_END)
    assert end_of_turn(tokenizer) != tokenizer.eos_token_id


def test_the_end_of_a_turn_may_be_the_end_of_the_text_after_a_space():
    tokenizer = qwen_tokenizer(LIKE_LLAMA_2)
    assert end_of_turn(tokenizer) == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "template",
    [
        None,
        CHAT_TEMPLATE,
        "{{ raise_exception('no') }}",
        "{{ messages[0]['content'] }}<|im_end|>",
        "{{ messages[1]['content'] }}</think>",
        {"rag": TEMPLATE},
    ],
    ids=str,
)
def test_without_a_special_token_after_the_turn_there_is_no_end_of_turn(template):
    assert end_of_turn(qwen_tokenizer(template)) is None


def test_text_that_only_looks_like_the_token_is_no_end_of_turn():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE  # without <|im_end|> in the vocabulary
    assert end_of_turn(tokenizer) is None
