import json

import pytest

from lit_grpo.types.json_text import MAX_DEPTH, parse_json


def lists(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("text", ['{"a": [1, null, "é"]}', '{"a": [1, null, "é"]}'.encode()])
def test_a_text_and_its_bytes_have_one_value(text):
    assert parse_json(text) == {"a": [1, None, "é"]}


def test_a_hook_gets_the_pairs_of_every_object_repeated_keys_too():
    assert parse_json('{"a": 1, "b": {"a": 2, "a": 3}}', list) == [
        ("a", 1),
        ("b", [("a", 2), ("a", 3)]),
    ]


@pytest.mark.parametrize(
    "text", [lists(MAX_DEPTH + 1), lists(MAX_DEPTH + 1).encode(), '{"a":' * 5000, "[" * 100_000]
)
def test_deeper_nesting_than_the_limit_is_refused(text):
    with pytest.raises(ValueError, match="nested more than 200 deep"):
        parse_json(text)


@pytest.mark.parametrize(
    "text", [lists(MAX_DEPTH), json.dumps([[1]] * 500), json.dumps("[{" * 500)]
)
def test_only_the_depth_counts_and_no_bracket_in_a_text(text):
    assert parse_json(text) == json.loads(text)


def test_an_integer_that_python_cannot_read_is_named_by_its_digits():
    with pytest.raises(ValueError, match="^it has an integer of more than 4300 digits$"):
        parse_json("1" * 5000)


def test_what_is_no_json_has_the_error_of_python():
    with pytest.raises(json.JSONDecodeError, match="Expecting value"):
        parse_json('{"a": x}')
