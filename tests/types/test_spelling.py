import pytest

from lit_grpo.types.spelling import did_you_mean


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("promt", ["prompt", "answer"], " Did you mean prompt?"),
        ("rescor", ["score", "rescore"], " Did you mean rescore?"),
        ("rate", ["date", "ratio"], " Did you mean ratio?"),
        ("quite", ["other"], ""),
        ("adamw", ["Adam", "AdamW", "AdamW8bit"], " Did you mean AdamW?"),
        ("dappo", ["dapo", "dppo"], " Did you mean dapo?"),
        ("any", [], ""),
    ],
)
def test_a_close_word_is_suggested_rather_with_the_same_first_letter(word, known, expected):
    assert did_you_mean(word, known) == expected
