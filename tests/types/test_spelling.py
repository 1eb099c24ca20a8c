from pathlib import Path

import pytest

from lit_grpo.types.spelling import did_you_mean, did_you_mean_directory


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("promt", ["prompt", "answer"], " Did you mean prompt?"),
        ("rescor", ["score", "rescore"], " Did you mean rescore?"),
        ("rate", ["date", "ratio"], " Did you mean ratio?"),
        ("quite", ["other"], ""),
        ("adamw", ["Adam", "AdamW", "AdamW8bit"], " Did you mean AdamW?"),
        ("any", [], ""),
    ],
)
def test_a_close_word_is_suggested_rather_with_the_same_first_letter(word, known, expected):
    assert did_you_mean(word, known) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("runs/words/0", " Did you mean runs/words-slow/0?"),
        ("run/words-slow", " Did you mean runs/words-slow?"),
        ("runs/other/1", ""),
        ("run/words-slow/0", ""),
        ("runs/words-slow/0", ""),
    ],
)
def test_a_directory_of_a_similar_path_is_suggested(path, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/words-slow/0").mkdir(parents=True)
    Path("runs/words-slow/1").touch()
    assert did_you_mean_directory(Path(path)) == expected
