import pytest

from lit_grpo.types.spelling import did_you_mean, other_form


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


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("coefficient", ["coef", "estimator"], " Did you mean coef?"),
        ("num_epochs", ["epochs", "minibatches"], " Did you mean epochs?"),
        ("every", ["keep_last", "every_n_steps"], " Did you mean every_n_steps?"),
        ("rewards_of_mine", ["re", "ward"], ""),
        ("save_strategy", ["strategy"], ""),
        ("limit", ["limit_val_batches", "limit_train_batches"], " Did you mean limit_val_batches?"),
    ],
)
def test_a_shorter_or_a_longer_form_is_suggested(word, known, expected):
    assert other_form(word, known) == expected
