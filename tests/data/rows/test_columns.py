"""Which columns hold the prompt, the gold answer and the id, and what happens without them."""

import pytest

from lit_grpo.data import Row
from lit_grpo.data.rows.columns import prompt_id, prompt_value
from lit_grpo.data.rows.gold import gold_answers


def row(number: int = 1, source: str = "t.jsonl", **columns) -> Row:
    return Row(source=source, number=number, id=f"t:{number}", columns=columns)


def gold(*rows: Row, required: bool = True, **mapping: str) -> list[str | None]:
    return gold_answers(rows, mapping, required=required)


def test_layouts_are_recognised_from_the_columns():
    messages = [{"role": "user", "content": "2+2?"}]
    verl = row(prompt=messages, reward_model={"style": "rule", "ground_truth": "4"})
    assert (prompt_value(verl, {}), gold(verl)) == (messages, ["4"])
    plain = row(prompt="2+2?", question="two plus two?", answer=4)
    assert (prompt_value(plain, {}), gold(plain)) == ("2+2?", ["4"])
    gsm8k = row(question="2+2?", answer="Count.\n#### 4")
    assert (prompt_value(gsm8k, {}), gold(gsm8k)) == ("2+2?", ["4"])


def test_a_mapping_overrides_the_layout_and_reaches_into_nested_columns():
    both = row(prompt="a", problem="b", answer="1", info={"gold": {"value": "2"}, "uid": 7})
    mapping = {"prompt": "problem", "answer": "info.gold.value", "id": "info.uid"}
    assert prompt_value(both, mapping) == "b"
    assert gold(both, answer=mapping["answer"]) == ["2"]
    assert prompt_id(both, mapping) == "7"
    assert prompt_id(both, {}) == "t:1"
    assert gold(both, prompt="problem") == ["1"]


def test_a_column_with_a_dot_in_its_name_is_found_before_a_nested_one():
    assert gold(row(prompt="a", a={"b": "nested"}, **{"a.b": "flat"}), answer="a.b") == ["flat"]


def test_a_missing_prompt_column_is_refused_with_the_columns_that_exist():
    with pytest.raises(ValueError, match=r"t\.jsonl, row 3 has no column that is recognised as"):
        prompt_value(row(3, problem="p", answer="1"), {})
    with pytest.raises(ValueError, match=r"no column 'qestion' \(did you mean 'question'\?\); it"):
        prompt_value(row(question="p", answer="1"), {"prompt": "qestion"})


def test_a_column_that_has_another_role_is_not_proposed():
    mine, mapping = row(query="p", solution="1"), {"prompt": "question", "answer": "solution"}
    with pytest.raises(ValueError, match=r"has no column 'question'; .* {prompt: NAME}"):
        prompt_value(mine, mapping)
    with pytest.raises(ValueError, match=r"'question' \(did you mean 'solution'\?\)"):
        prompt_value(mine, {"prompt": "question"})
    theirs = row(question="p", gold="1")
    with pytest.raises(ValueError, match=r"no column 'Solution'; .*It holds for all files"):
        gold_answers([theirs], {"answer": "Solution"}, required=True)


@pytest.mark.parametrize(("value", "got"), [(None, "nothing"), ([], "nothing"), (3, "the int 3")])
def test_a_prompt_that_is_neither_text_nor_messages_is_refused(value, got):
    with pytest.raises(ValueError, match=rf"jsonl, row 2: the prompt column 'prompt' .* got {got}"):
        prompt_value(row(2, prompt=value), {})


def test_a_null_id_and_a_missing_id_column_are_refused():
    with pytest.raises(ValueError, match="row 1: the id column 'uid' is null"):
        prompt_id(row(prompt="p", uid=None), {"id": "uid"})
    with pytest.raises(ValueError, match="row 1 has no column 'udi' .did you mean 'uid'"):
        prompt_id(row(prompt="p", uid=1), {"id": "udi"})


@pytest.mark.parametrize("value", [b"a", {"a": 1}, ["a"]])
def test_an_id_that_is_no_text_is_refused(value):
    with pytest.raises(ValueError, match="row 1: an id must be text or a number, got the"):
        prompt_id(row(prompt="p", uid=value), {"id": "uid"})


def test_messages_are_suggested_as_the_prompt_but_not_taken():
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    with pytest.raises(ValueError, match=r"prompt: messages\}\. It holds for all files"):
        prompt_value(row(messages=messages[:1], answer="4"), {})
    last = r"The last turn of messages is the assistant's: move its text from there to a column ans"
    with pytest.raises(ValueError, match=rf"Set data\.columns: \{{prompt: messages\}}\. .* {last}"):
        prompt_value(row(messages=messages, answer="4"), {})
    with pytest.raises(ValueError, match=rf"\{{prompt: messages, answer: NAME\}}.* {last}"):
        gold(row(messages=messages))
