"""Prompts that ask for a rubric, with and without excerpts of a good and a bad answer."""

import json

import numpy as np
import pandas as pd
import pytest

from lit_grpo.data import RubricData
from lit_grpo.data.prompts.prompt_format import build_prompts
from lit_grpo.policy.byte_tokenizer import byte_tokenizer

ROWS = [
    {"question": "Why?", "answers": ["so so", "best " * 50, "worst"], "gold_scores": [0.5, 0.9, 0]},
    {"question": "Who?", "answers": ["same", "alike"], "gold_scores": [0.4, 0.4]},
]


@pytest.fixture
def source(tmp_path, monkeypatch):
    def write(rows=ROWS):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return "rows.jsonl"

    monkeypatch.chdir(tmp_path)
    return write


def prompts(source: str, **settings):
    """The prompts of a file by their question."""
    data = RubricData(source, **settings)
    found = build_prompts(data.rows("train"), byte_tokenizer(), data.prompt_format)
    return {one.columns["question"]: one for one in found}


def test_without_contrast_the_prompt_shows_the_question_and_no_answer(source):
    found = prompts(source())
    assert found["Why?"].text.endswith("Question:\nWhy?\n")
    assert "best" not in found["Why?"].text
    assert found["Why?"].answer is None
    assert found["Why?"].columns["good_excerpt"] is None


def test_with_contrast_the_prompt_shows_how_the_best_and_the_worst_answer_begin(source):
    text = prompts(source(), use_contrastive=True, excerpt_characters=9)["Why?"].text
    assert "Why?\n\nA good answer to it begins:\nbest best …\n" in text
    assert "\n\nA bad answer to it begins:\nworst\n" in text
    assert "so so" not in text
    assert "0.9" not in text


def test_answers_of_equal_quality_are_not_shown(source):
    text = prompts(source(), use_contrastive=True)["Who?"].text
    assert text == prompts(source())["Who?"].text


def test_parquet_with_lists_and_with_json_gives_the_same_prompts(source):
    expected = prompts(source(), use_contrastive=True)
    table = pd.DataFrame(ROWS)
    table.assign(answers=table["answers"].map(np.array)).to_parquet("lists.parquet")
    as_json = {name: table[name].map(json.dumps) for name in ("answers", "gold_scores")}
    table.assign(**as_json).to_parquet("json.parquet")
    for name in ("lists.parquet", "json.parquet"):
        found = prompts(name, use_contrastive=True)
        assert {key: one.text for key, one in found.items()} == {
            key: one.text for key, one in expected.items()
        }


def test_a_custom_template_gets_the_excerpts(source):
    template = (
        "{{ question }}{% if good_excerpt %} {{ good_excerpt }} > {{ bad_excerpt }}{% endif %}"
    )
    found = prompts(source(), template=template, use_contrastive=True, excerpt_characters=4)
    assert found["Why?"].text == "Why? best … > wors …"
    assert found["Who?"].text == "Who?"


def test_rows_without_gold_scores_are_refused_by_name(source):
    rows = [*ROWS, {"question": "When?", "answers": ["a", "b"], "gold_scores": None}]
    with pytest.raises(ValueError, match="1 of 3 have none that can be read: rows.jsonl, row 3"):
        prompts(source(rows), use_contrastive=True)
    assert len(prompts(source(rows))) == 3


def test_an_excerpt_without_characters_is_refused():
    with pytest.raises(ValueError, match="excerpt_characters must be >= 1, got 0"):
        RubricData("rows.jsonl", excerpt_characters=0)
