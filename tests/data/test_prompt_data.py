"""Files and datasets of any layout as the data of a training run."""

import math

import pandas as pd
import pytest
from data_runs import fit, flat, write_rows
from paths import GSM8K
from small_runs import make_trainer
from tiny import prompt

from lit_grpo.data import PromptData
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.types import UserError


def test_nothing_is_read_before_setup():
    PromptData(train="missing.jsonl", validation="missing/dataset:main:test", template="{{ q }}")


def test_the_held_out_rows_do_not_depend_on_seed_limit_or_fraction_of_the_same_size(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", 20)

    def held_out(**choices) -> list[str]:
        return [row.id for row in PromptData(path, **choices).rows("validation")]

    assert held_out(validation_size=4, seed=1) == held_out(validation_size=0.2, max_prompt_tokens=9)
    assert len(held_out(validation_size=4)) == 4


@pytest.mark.parametrize("seed", range(4))
def test_a_training_on_all_rows_does_not_begin_with_those_held_out_from_another(tmp_path, seed):
    path = write_rows(tmp_path / "t.jsonl", 200)
    held_out = {row.id for row in PromptData(path, validation_size=40).rows("validation")}
    prompts = [prompt(str(n), id=row.id) for n, row in enumerate(PromptData(path).rows("train"))]
    loader = PromptLoader(prompts, 40, seed=seed)
    first = {one.id for one in next(iter(loader))}
    assert len(first & held_out) < 20  # of 40, by chance 8


@pytest.mark.parametrize("size", [20, 1.0, 0.001])
def test_a_validation_size_that_leaves_one_split_empty_is_refused(tmp_path, size):
    path = write_rows(tmp_path / "t.jsonl", 20)
    with pytest.raises(ValueError, match=rf"below the 20 rows, got {size}, which holds out"):
        PromptData(path, validation_size=size).rows("train")


def test_files_of_different_kinds_and_layouts_make_up_one_training_split(tmp_path):
    messages = [{"role": "user", "content": "q"}]
    verl = [{"prompt": messages, "reward_model": {"ground_truth": "1"}, "extra_info": {"i": 0}}]
    pd.DataFrame(verl).to_parquet(tmp_path / "v.parquet")
    (tmp_path / "c.csv").write_text("question,answer\nq,2\n")
    files = [write_rows(tmp_path / "j.jsonl", 2), tmp_path / "v.parquet", tmp_path / "c.csv"]
    seen = fit(PromptData([str(file) for file in files], prompts_per_step=4)).trained
    assert sorted(flat(seen)) == ["c:1", "j:1", "j:2", "v:1"]


def test_validation_and_test_data_come_from_their_own_files(tmp_path, caplog):
    caplog.set_level("INFO")
    train, validation, test = (write_rows(tmp_path / f"{n}.jsonl", 3) for n in ("a", "b", "c"))
    data = PromptData(train, validation, test, prompts_per_step=3)
    module = fit(data)
    assert flat(module.trained)[0].startswith("a:")
    assert flat(module.evaluated) == ["b:1", "b:2", "b:3"]
    module.evaluated.clear()
    make_trainer().test(module, datamodule=data, verbose=False)
    assert flat(module.evaluated) == ["c:1", "c:2", "c:3"]
    module.evaluated.clear()
    said = "test data: the validation data, since data.test names no others"
    assert said not in caplog.messages
    make_trainer().test(module, datamodule=PromptData(train, validation), verbose=False)
    assert flat(module.evaluated) == ["b:1", "b:2", "b:3"]
    assert said in caplog.messages


def test_conflicting_or_impossible_settings_are_refused_at_once():
    with pytest.raises(ValueError, match="validation_size must be 0 with validation=b.jsonl"):
        PromptData("a.jsonl", "b.jsonl", validation_size=3)
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        PromptData("a.jsonl", seed=-1)
    for size in (-1, math.nan):
        with pytest.raises(ValueError, match=f"validation_size must be >= 0, got {size}"):
            PromptData("a.jsonl", validation_size=size)


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
def test_gsm8k_files_are_read_as_they_are():
    data = PromptData(
        str(GSM8K / "train.jsonl"),
        str(GSM8K / "test.jsonl"),
        template="Question: {{ question }}\nAnswer:",
        prompts_per_step=512,
    )
    module = fit(data, max_epochs=1, max_steps=-1)
    assert [len(batch) for batch in module.trained] == [512] * 14
    assert len(set(flat(module.trained))) == 14 * 512
    assert flat(module.evaluated) == [f"test:{n}" for n in range(1, 1320)]
    prompts = data.train_dataloader().prompts
    assert len(prompts) == 7473
    assert prompts[0].text.startswith("Question: Natalia sold clips to 48 of her friends in April")
    assert prompts[0].answer == "72"
    assert prompts[0].columns["answer"].endswith("#### 72")
    assert all(prompt.answer.lstrip("-").isdigit() for prompt in prompts)


def test_without_held_out_rows_only_the_training_split_reads_the_data(tmp_path):
    data = PromptData(str(tmp_path / "absent.jsonl"))
    assert data.rows("validation") == []
    with pytest.raises(UserError, match=r"absent\.jsonl"):
        data.rows("train")
