"""Data modules under a real trainer: what is read, split and batched."""

import json
import logging
from pathlib import Path

import pytest
from data_runs import fit, flat, sums, write_rows
from small_runs import make_trainer

from lit_grpo.data import (
    AdditionData,
    MixtureData,
    MixtureSource,
    PromptData,
    PromptDataModule,
    PromptFormat,
)
from lit_grpo.types import UserError


class Squares(PromptDataModule):
    """A data module as a user writes it, without an ``__init__``."""

    prompt_format = PromptFormat(require_answer=False)

    def rows(self, split):
        numbers = range(6) if split == "train" else range(6, 9)
        return [{"prompt": f"{n}*{n}=", "square": n * n} for n in numbers]


def test_an_own_data_module_needs_only_rows_that_are_dicts():
    data = Squares(prompts_per_step=3)
    module = fit(data, max_steps=2, val_check_interval=2)
    assert sorted(flat(module.trained)) == [f"train:{n}" for n in range(1, 7)]
    assert flat(module.evaluated) == [f"validation:{n}" for n in range(1, 4)]
    assert data.train_dataloader().some_prompts()[0].columns.keys() == {"prompt", "square"}
    assert (Squares().prompts_per_step, Squares().validation_batch_size) == (64, 64)


class WithoutAnswers(PromptDataModule):
    def rows(self, split):
        return [{"prompt": "1+1=", "gold": "2"}]


class WithoutSplit(PromptDataModule):
    def rows(self):
        return [{"prompt": "1+1=", "answer": "2"}]


def test_rows_that_take_no_split_are_told_what_to_write():
    with pytest.raises(UserError, match=r"WithoutSplit.rows must take the split, got rows\(\)"):
        fit(WithoutSplit(), max_steps=1)


def test_a_conversation_that_ends_with_the_answer_is_warned_of(caplog):
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows = [{"prompt": turns, "answer": "2"}, {"prompt": turns[:1], "answer": "2"}]
    fit(PromptData(rows, prompts_per_step=2), max_steps=1)
    (warned,) = [one for one in caplog.messages if "turn of the assistant" in one]
    assert warned.startswith("train data: 1 of 2 prompts end with a turn of the assistant, which")


def test_an_own_data_module_is_told_of_its_prompt_format():
    with pytest.raises(
        UserError, match=r"Set columns=\{'answer': 'gold'\}, or require_answer=Fa"
    ) as e:
        fit(WithoutAnswers(prompts_per_step=1), max_steps=1)
    assert str(e.value).endswith(
        "These are arguments of PromptFormat: set prompt_format of WithoutAnswers."
    )


class WithoutSuper(Squares):
    def __init__(self):
        self.prompts_per_step = 3


def test_an_own_data_module_that_does_not_call_its_base_is_told_to():
    with pytest.raises(UserError, match=r"^WithoutSuper\.__init__ must call super\(\)\.__init__:"):
        fit(WithoutSuper(), max_steps=1)


def test_an_own_data_module_may_be_a_source_of_a_mixture():
    data = MixtureData({"squares": MixtureSource(data=Squares())}, prompts_per_step=3)
    module = fit(data, max_steps=2)
    assert sorted(flat(module.trained)) == [f"train:{n}" for n in range(1, 7)]
    assert [row.id for row in data.rows("validation")] == [f"validation:{n}" for n in range(1, 4)]


def test_the_order_differs_between_seeds_and_epochs_but_not_between_runs():
    def order(seed: int) -> list[str]:
        data = AdditionData(1, validation_size=10, prompts_per_step=9, seed=seed)
        return flat(fit(data, max_steps=20).trained)

    first = order(0)
    assert first[:90] != first[90:]
    assert sorted(first[:90]) == sorted(first[90:])
    assert first == order(0)
    assert first != order(1)


def test_overfit_batches_repeats_the_same_batches_in_every_epoch():
    trained = fit(sums(), max_epochs=3, max_steps=-1, overfit_batches=2).trained
    assert trained[:2] == trained[2:4] == trained[4:6]
    assert trained[0] != trained[1]


def test_rows_reach_the_module_and_each_held_out_row_is_validated_once(tmp_path, caplog):
    path = write_rows(tmp_path / "t.jsonl", 23)
    data = PromptData(path, validation_size=5, prompts_per_step=6, validation_batch_size=2)
    with caplog.at_level(logging.INFO, logger="lit_grpo"):
        module = fit(data, max_steps=3, val_check_interval=3)
    assert len(module.evaluated) == 3
    held_out, trained = flat(module.evaluated), flat(module.trained)
    assert len(set(held_out)) == len(held_out) == 5
    assert set(trained) | set(held_out) == {f"t:{n}" for n in range(1, 24)}
    assert not set(trained) & set(held_out)
    assert "train data: 18 rows\n" in caplog.text
    assert "validation data: 5 rows\n" in caplog.text


def test_a_run_without_validation_data_trains_but_cannot_be_validated(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", 4)
    module = fit(PromptData(path, prompts_per_step=2), max_steps=4)
    assert (len(module.trained), module.evaluated) == (4, [])
    with pytest.raises(ValueError, match=r"validation data .* got none\. Set data\.validation to"):
        make_trainer().validate(module, datamodule=PromptData(path), verbose=False)
    with pytest.raises(ValueError, match=r"train data .* got none\. Set data\.train\."):
        fit(PromptData())


def test_an_evaluation_of_training_rows_says_so(tmp_path, caplog):
    trained, other = (Path(write_rows(tmp_path / f"{name}.jsonl", 4)) for name in ("t", "u"))
    rows = [json.loads(line) for line in trained.read_text().splitlines()]
    other.write_text("\n".join(json.dumps(row | {"question": f"?{row}"}) for row in rows))
    module = fit(PromptData(trained, prompts_per_step=2), max_steps=1)

    def warnings(**sources) -> list[str]:
        caplog.clear()
        make_trainer().test(module, datamodule=PromptData(**sources), verbose=False)
        return [one.getMessage() for one in caplog.records if one.name.startswith("lit_grpo")]

    (warned,) = [one for one in warnings(train=trained, test=trained) if "training prompts" in one]
    assert warned.startswith("4 of 4 held-out prompts are training prompts, too")
    for sources in (
        {"train": trained, "test": other},
        {"test": trained},
        {"train": str(tmp_path / "gone.jsonl"), "test": trained},
    ):
        assert not any("training prompts" in one for one in warnings(**sources)), sources


def test_dropped_prompts_are_counted_in_a_warning(tmp_path, caplog):
    path = write_rows(tmp_path / "t.jsonl", 12)
    module = fit(PromptData(path, prompts_per_step=9, max_prompt_tokens=2))
    assert sorted(flat(module.trained)) == [f"t:{n}" for n in range(1, 10)]
    (warned,) = (one for one in caplog.records if "dropped" in one.getMessage())
    assert "12 rows, 3 of them dropped (longer than max_prompt_tokens=2)" in warned.getMessage()
    assert warned.levelname == "WARNING"


def test_held_out_rows_that_are_all_too_long_are_told_from_those_to_train_on(tmp_path):
    short, long = write_rows(tmp_path / "t.jsonl", 9), tmp_path / "v.jsonl"
    long.write_text(json.dumps({"prompt": "xxxx", "answer": "y"}))
    data = PromptData(short, str(long), prompts_per_step=9, max_prompt_tokens=2)
    with pytest.raises(UserError, match=r"1 of 1 prompts of the validation data are longer"):
        fit(data)


def test_repeated_ids_and_contradicting_answers_are_named_in_warnings(tmp_path, caplog):
    path = tmp_path / "t.jsonl"
    rows = [{"prompt": "1", "answer": answer, "n": 7} for answer in "xy"]
    path.write_text("\n".join(map(json.dumps, rows)))
    fit(PromptData(str(path), prompts_per_step=2, columns={"id": "n"}))
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    first, second = [one for one in warned if one.startswith("train data: 1 ")]
    assert "1 id of more than one prompt, such as '7': " in first
    assert "1 prompt with more than one gold answer, such as 'x' of 7 and 'y' of 7: " in second
