"""The gold answers of rows, and what happens without them."""

import math

import numpy as np
import pytest

from lit_grpo.data import Row
from lit_grpo.data.rows.gold import answer_place, gold_answers


def row(number: int = 1, source: str = "t.jsonl", **columns) -> Row:
    return Row(source=source, number=number, id=f"t:{number}", columns=columns)


def gold(*rows: Row, required: bool = True, **mapping: str) -> list[str | None]:
    return gold_answers(rows, mapping, required=required)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Sum.\n#### 72", "72"),
        ("Sum.\n#### 1,080", "1080"),
        ("#### -2,125,000 ", "-2125000"),
        ("#### (1, 2)", "(1, 2)"),
        ("#### Title\nand then text", "#### Title\nand then text"),
        ("1,080", "1,080"),
    ],
)
def test_the_gold_is_the_text_after_the_mark_of_gsm8k_without_thousands_commas(answer, expected):
    assert gold(row(question="q", answer=answer)) == [expected]


def test_an_answer_without_the_mark_counts_as_null_in_a_file_where_others_have_it():
    rows = [row(1, question="q", answer="#### 4"), row(2, question="q", answer="forgotten")]
    with pytest.raises(ValueError, match=r"1 of 2 rows have no gold .*: t\.jsonl, row 2 "):
        gold(*rows)


def test_a_mark_in_one_file_does_not_affect_another():
    rows = [row(question="q", answer="#### 4"), row(source="u.csv", question="q", answer="five")]
    assert gold(*rows) == ["4", "five"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (72, "72"),
        (72.0, "72"),
        (0.5, "0.5"),
        (["1", "½"], '["1", "½"]'),
        (False, "False"),
        (0, "0"),
        (np.int64(72), "72"),
        (np.float32(0.5), "0.5"),
    ],
)
def test_gold_answers_become_text(value, expected):
    assert gold(row(prompt="p", answer=value)) == [expected]


@pytest.mark.parametrize("null", [None, math.nan, np.float32("nan"), "", "  "])
def test_rows_with_null_golds_are_counted_and_named_together_with_the_fix(null):
    rows = [row(n, prompt="p", answer=null if n > 1 else "1") for n in range(1, 9)]
    with pytest.raises(ValueError, match="7 of 8 rows have no gold answer in 'answer'") as error:
        gold(*rows)
    assert "t.jsonl, row 2; t.jsonl, row 3" in str(error.value)
    assert "t.jsonl, row 6; and 2 more" in str(error.value)
    assert "data.require_answer: false" in str(error.value)
    assert gold(*rows, required=False) == ["1"] + [None] * 7


def test_a_column_that_is_named_already_is_not_asked_for_where_some_rows_have_no_answer():
    rows = [row(1, prompt="p", gold="1"), row(2, prompt="p", gold=None)]
    with pytest.raises(ValueError, match=r"in 'gold': t.jsonl, row 2 .* remove them, or set data"):
        gold(*rows, answer="gold")


def test_rows_without_an_answer_column_are_refused_unless_none_is_required():
    with pytest.raises(ValueError, match=r"row 1 has no column .*; it has prompt, solution\. Set"):
        gold(row(prompt="p", solution="4"))
    assert gold(row(prompt="p"), required=False) == [None]


def test_columns_are_named_and_no_rows_listed_where_no_row_has_a_column_for_the_answer():
    with pytest.raises(ValueError, match=r"none of the 8 rows of t\.jsonl has a column") as error:
        gold(*(row(n, query="p", solution="4") for n in range(1, 9)))
    said = str(error.value)
    assert ", nor as the prompt; the first has query, solution. Set data.columns: {prompt: " in said
    assert ", row " not in said


def test_a_mapped_prompt_column_that_the_rows_lack_is_named_before_a_missing_answer():
    with pytest.raises(ValueError, match=r"has no column 'frage' \(did you mean 'Frage'\?\)"):
        gold(row(Frage="p", Antwort="4"), prompt="frage")
    with pytest.raises(ValueError, match="no column that is recognised as the gold answer"):
        gold(row(Frage="p", Antwort="4"), prompt="Frage")


def test_a_mapped_answer_column_that_no_row_has_is_refused_even_if_no_answer_is_required():
    with pytest.raises(ValueError, match=r"row 1 has no column 'anser' \(did you mean 'answer'\?"):
        gold(row(prompt="p", answer="1"), required=False, answer="anser")


def test_a_list_of_answers_becomes_one_of_texts():
    rows = [row(prompt="a", answer=["1/2", 0.5]), row(prompt="b", answer=[3])]
    assert gold(*rows) == ['["1/2", "0.5"]', '["3"]']
    with pytest.raises(ValueError, match="1 of 1 rows have no gold answer"):
        gold(row(prompt="a", answer=[]))


@pytest.mark.parametrize("answer", [b"\xff1", {"v": 0}, [["1"]], ["1", None], [b"1"]])
def test_an_answer_that_is_no_text_is_refused_with_its_row_and_column(answer):
    with pytest.raises(ValueError, match=r"t\.jsonl, row 2: the answer column 'gold' must hold"):
        gold(row(1, prompt="a", gold="1"), row(2, prompt="a", gold=answer), answer="gold")


def test_columns_with_spaces_and_capitals_are_quoted_and_a_missing_prompt_is_named_as_well():
    with pytest.raises(
        ValueError, match=r", nor as the prompt; it has 'Prompt', ' Answer'\."
    ) as error:
        gold(row(Prompt="1+1=", **{" Answer": "2"}))
    assert 'data.columns: {prompt: "Prompt", answer: " Answer"}' in str(error.value)


@pytest.mark.parametrize(
    ("answer", "columns", "place"),
    [
        ("1080", {"question": "q", "answer": "Sum.\n#### 1,080"}, "column answer, after ####"),
        ("4", {"level": 4, "answer": "4"}, "column answer"),
        ("4", {"reward_model": {"ground_truth": 4}}, "column reward_model.ground_truth"),
        ('["1/2", "0.5"]', {"prompt": "q", "gold": ["1/2", "0.5"]}, "column gold"),
        ("4", {"prompt": "2+2?", "info": {"gold": "4"}}, ""),
    ],
)
def test_the_place_of_a_gold_answer_is_found(answer, columns, place):
    assert answer_place(answer, columns) == place


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"completion": "2"}, "completion"),
        ({"Solution": "2", "label": "x"}, "Solution"),
        ({"n": 2}, "NAME"),
    ],
)
def test_a_usual_name_of_a_gold_answer_is_proposed(columns, answer):
    given = row(prompt="1+1=", **columns)
    with pytest.raises(ValueError, match=rf"Set data\.columns: \{{answer: \"?{answer}\"?\}}"):
        gold_answers([given], {}, required=True)
