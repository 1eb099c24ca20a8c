"""The chat template gets its arguments and its tools, and nothing is lost on the way."""

import json

import pytest
from chat_models import chat_prompts, qwen_tokenizer

from lit_grpo.policy.byte_tokenizer import byte_tokenizer

TOKENIZER = qwen_tokenizer()
ROW = {"prompt": "2+2?"}
START = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"x": {"type": "number"}}}}


def text(row=ROW, tokenizer=TOKENIZER, **settings) -> str:
    (prompt,) = chat_prompts(tokenizer, row, **settings)
    assert prompt.token_ids == tuple(tokenizer(prompt.text)["input_ids"])
    return prompt.text


def test_the_arguments_of_the_chat_template_reach_it():
    assert text() == START
    assert text(chat_template_kwargs={"enable_thinking": True}) == START
    without = text(chat_template_kwargs={"enable_thinking": False})
    assert without == START + "<think>\n\n</think>\n\n"


def test_an_argument_that_the_template_does_not_use_is_refused():
    with pytest.raises(ValueError, match=r"got 'enable_thinkin', .* data.chat_template_kwargs"):
        text(chat_template_kwargs={"enable_thinkin": False})


@pytest.mark.parametrize("name", ["tools", "messages", "add_generation_prompt", "tokenize"])
def test_an_argument_that_every_prompt_sets_is_refused(name):
    with pytest.raises(ValueError, match=f"chat_template_kwargs must not have '{name}'"):
        text(chat_template_kwargs={name: True})


def test_arguments_without_a_conversation_are_refused():
    with pytest.raises(ValueError, match="chat_template_kwargs needs a conversation"):
        text(chat=False, chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize("as_column", [list, json.dumps], ids=["list", "json"])
def test_tools_reach_the_template_from_their_column(as_column):
    shown = f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n{START}"
    assert text(ROW | {"tools": as_column([TOOL])}) == shown
    assert text(ROW | {"functions": as_column([TOOL])}, tools_column="functions") == shown
    assert text(ROW | {"tools": as_column([TOOL])}, tools_column=None) == START


@pytest.mark.parametrize("empty", [None, "", [], "[]", "null"], ids=repr)
def test_a_row_without_tools_has_none(empty):
    assert text(ROW | {"tools": empty}) == START


def test_fields_that_parquet_filled_in_are_left_out_of_a_list_but_not_of_json():
    filled = {"name": "add", "enum": None, "items": [{"type": "x", "of": None}]}
    assert '{"name": "add", "items": [{"type": "x"}]}' in text(ROW | {"tools": [filled]})
    assert json.dumps(filled) in text(ROW | {"tools": json.dumps([filled])})


@pytest.mark.parametrize("wrong", ["hammer", ["hammer"], {"name": "add"}, "{}", 3], ids=repr)
def test_tools_that_are_no_list_of_schemas_are_refused_with_their_row(wrong):
    with pytest.raises(ValueError, match=r"row 1: the tools in column 'tools' must be a list .*"):
        text(ROW | {"tools": wrong})
    assert text(ROW | {"tools": wrong}, tools_column=None) == START


def test_tools_that_the_template_would_lose_are_refused():
    with pytest.raises(ValueError, match=r"row 1 has tools, but .* data.tools_column: null"):
        text(ROW | {"tools": [TOOL]}, byte_tokenizer())


def test_a_chosen_tools_column_must_exist():
    with pytest.raises(ValueError, match="tools_column must be a column of the data, got 'tool'"):
        text(ROW | {"tools": [TOOL]}, tools_column="tool")


def test_one_of_several_named_templates_may_use_an_argument():
    tokenizer = qwen_tokenizer({"default": TOKENIZER.chat_template, "rag": "{{ documents }}"})
    assert text(tokenizer=tokenizer, chat_template_kwargs={"enable_thinking": True}) == START


def test_a_conversation_needs_a_tokenizer_with_a_chat_template():
    with pytest.raises(ValueError, match=r"row 1 is a conversation, but .* no chat template"):
        text(tokenizer=qwen_tokenizer(None), chat_template_kwargs={"enable_thinking": True})
