"""What ``lit-grpo doctor`` finds in the rows of a run, and what it says that rewards can score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doctor_runs import doctor, write_rows
from prepared_data import write_prepared

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([{"prompt": None, "answer": "2"}], {}, "must hold text or a list of messages"),
        ([{"prompt": " ", "answer": "2"}], {}, "must hold text or a list of messages"),
        ([{"prompt": "1+1=", "answer": None}], {}, "1 of 9 rows have no gold answer"),
        ([{"prompt": "1+1=", "answer": "to be or not to be"}], {}, "every gold answer must be"),
        ([{"prompt": "1" * 200, "answer": "2"}], {}, "the model has only 128 positions"),
        ([], {"prompts_per_step": 100}, "too few training prompts: 8"),
    ],
)
def test_data_that_cannot_be_trained_on_is_a_failed_check(rows, settings, words, capsys):
    exit_code, shown = doctor(capsys, *write_rows(*ROWS, *rows, **settings))
    assert exit_code == 1
    assert words in shown["data"]
    assert shown["summary"].strip() == "Do not start yet: data failed."


def test_leaked_repeated_and_dropped_rows_are_remarks(capsys):
    rows = [*ROWS, ROWS[0], {"prompt": "1" * 50, "answer": "2"}]
    Path("held_out.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    data = write_rows(*rows, validation="held_out.jsonl", max_prompt_tokens=20)
    exit_code, shown = doctor(capsys, *data)
    assert exit_code == 0
    assert "1 of 1 held-out prompts are training prompts, too" in shown["data"]
    assert "1 of 9 training prompts repeat others" in shown["data"]
    assert "train data: 10 rows, 1 of them dropped" in shown["data"]
    assert "longest 4 (data.max_prompt_tokens: 20)" in shown["data"]
    assert "with remarks on" in shown["summary"]


def test_each_reward_sees_the_rows_of_its_own_sources_only(here, capsys):
    """The open rows have no gold answers, and the verifiable ones no stored answers."""
    write_prepared(here / "data")
    sources = {
        name: {"data": {"class_path": kind, "init_args": {"train": "data", "where": where}}}
        for name, kind, where in (
            ("verifiable", "PromptData", {"source": "verifiable"}),
            ("open", "RubricData", {"source": "open"}),
        )
    }
    data = {"class_path": "MixtureData", "init_args": {"sources": sources, "prompts_per_step": 2}}
    judge = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "auth": "none"}
    given = {
        "math": ("MathReward", {"only_sources": ["verifiable"]}),
        "alignment": ("RubricAlignmentReward", {"only_sources": ["open"], "judge": judge}),
        "constant": ("code_rewards.Constant", {"only_sources": ["verifiable"], "value": 1.0}),
    }
    rewards = [{"class_path": kind, "init_args": settings} for kind, settings in given.values()]
    words = [
        f"--data={json.dumps(data)}",
        "--model.policy.architecture.max_position_embeddings=512",
    ]
    words += ["--model.evaluation.accuracy.class_path=MathReward", "--offline"]
    words += ["--model.evaluation.accuracy.init_args.only_sources=[verifiable]"]
    exit_code, shown = doctor(capsys, *words, f"--model.rewards={json.dumps(rewards)}")
    assert exit_code == 0, shown
    scored = "math, rubric_alignment can score every training prompt of their sources."
    assert scored in shown["data"]
    assert "math can score every held-out prompt of its sources." in shown["data"]
    assert "no gold answer" not in shown["data"]
    rewards[2]["init_args"]["only_sources"] = ["open"]
    exit_code, shown = doctor(capsys, *words, f"--model.rewards={json.dumps(rewards)}")
    assert "8 of the 8 training prompts of constant have no gold answer" in shown["data"]
    rewards[1]["init_args"]["only_sources"] = ["verifiable"]
    exit_code, shown = doctor(capsys, *words, f"--model.rewards={json.dumps(rewards)}")
    assert exit_code == 1
    assert "8 of 8 do not" in shown["data"]


def close(completions, answer, **columns):
    """Compare with gold answers that must be numbers."""
    return [-abs(len(text) - int(gold)) for text, gold in zip(completions, answer, strict=True)]


def shortness(completions):
    return [-len(one) for one in completions]


def test_a_built_in_reward_that_checks_no_prompts_can_score_any(capsys):
    rewards = "[MathReward, {class_path: FormatReward, init_args: {pattern: '[0-9]'}}]"
    exit_code, shown = doctor(capsys, *write_rows(*ROWS), f"--model.rewards={rewards}")
    assert exit_code == 0
    assert "math, format can score every training prompt." in shown["data"]
    assert "is not known" not in shown["data"]


def test_of_a_function_only_the_columns_are_said_to_be_right(capsys):
    """Every call fails, since the answers are lists; that the columns are there is true."""
    rows = write_rows(*({"prompt": f"1+{n}=", "answer": ["2", "two"]} for n in range(4)))
    names = ("close", "shortness")
    paths = [f"{__name__}:{name}" for name in names]
    rewards = [{"class_path": "FunctionReward", "init_args": {"function": one}} for one in paths]
    exit_code, shown = doctor(capsys, *rows, f"--model.rewards={json.dumps(rewards)}")
    assert exit_code == 0
    columns = "The columns that close requires are in every training prompt: answer."
    assert f"{columns} --probe lets rewards score some completions." in shown["data"]
    assert "shortness requires no columns." in shown["data"]
    assert "can score" not in shown["data"]
    exit_code, shown = doctor(capsys, *rows, "--probe", f"--model.rewards={json.dumps(rewards)}")
    assert exit_code == 1
    assert columns in shown["data"]
    assert "--probe" not in shown["data"]


def test_a_prompt_that_ends_with_an_answer_is_a_remark(capsys):
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    words = write_rows(
        {"prompt": turns, "answer": "2"}, {"prompt": turns[:1], "answer": "2"}, validation_size=0
    )
    _, shown = doctor(capsys, *words)
    assert "1 of 2 prompts end with a turn of the assistant" in shown["data"]
