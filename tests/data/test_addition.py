"""The built-in task: which sums are generated, held out and refused."""

import pytest

from lit_grpo.data import AdditionData
from lit_grpo.data.prompts.prompt_format import build_prompts
from lit_grpo.policy.byte_tokenizer import byte_tokenizer


def texts(data: AdditionData, split: str) -> list[str]:
    return [row.columns["prompt"] for row in data.rows(split)]


def test_a_prompt_is_a_sum_and_its_answer_the_result():
    data = AdditionData(train_size=50, validation_size=10)
    for prompt in build_prompts(data.rows("train"), byte_tokenizer(), data.prompt_format):
        left, right = prompt.columns["left"], prompt.columns["right"]
        assert prompt.text == f"{left}+{right}="
        assert prompt.answer == str(left + right)
        assert 10 <= left <= 99
        assert 10 <= right <= 99
        assert len(prompt.token_ids) == 6


def test_all_sums_are_used_once_when_no_size_is_given():
    data = AdditionData(1, validation_size=7)
    train, held_out = texts(data, "train"), texts(data, "validation")
    assert (len(train), len(held_out)) == (93, 7)
    assert set(train) | set(held_out) == {f"{a}+{b}=" for a in range(10) for b in range(10)}
    assert texts(data, "test") == held_out


def test_the_held_out_sums_do_not_depend_on_seed_or_train_size():
    data = AdditionData(2, train_size=50, validation_size=100, seed=0)
    other = AdditionData(2, train_size=700, validation_size=100, seed=1)
    assert texts(data, "validation") == texts(other, "validation")
    assert texts(data, "train") != texts(other, "train")[:50]
    for each in (data, other):
        assert not set(texts(each, "train")) & set(texts(each, "validation"))
        assert len(set(texts(each, "train"))) == each.train_size


def test_long_sums_are_sampled_without_listing_them_all():
    data = AdditionData(9, train_size=20, validation_size=5)
    assert {len(text) for text in texts(data, "train")} == {20}


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"train_size \(96\) and validation_size \(5\) must share"):
        AdditionData(1, train_size=96, validation_size=5)
    with pytest.raises(ValueError, match=r"train_size \(0\)"):
        AdditionData(1, validation_size=100)
    with pytest.raises(ValueError, match="train_size must be <= 1000000, got 80999744"):
        AdditionData(4)
    with pytest.raises(ValueError, match=r"num_digits must be >= 1, got 0\. Set data\.num"):
        AdditionData(0)
