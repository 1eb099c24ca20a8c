"""What ``lit-grpo doctor`` finds in rewards: whether they start, can score, and have a signal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doctor_runs import doctor, rewarded, write_rows
from prepared_data import write_prepared

from lit_grpo.rewards import Reward

KEY = "KEY_OF_A_SERVICE"


def in_worker(class_path: str, **settings) -> str:
    inner = {"class_path": class_path, "init_args": settings}
    return rewarded("ProcessReward", reward=inner, num_workers=1)


WHERE = {
    "a worker": in_worker("code_rewards.NeedsKey"),
    "this process": rewarded("code_rewards.NeedsKey"),
}


@pytest.mark.parametrize("where", WHERE)
def test_a_reward_is_started_where_the_run_starts_it(where, monkeypatch, capsys):
    monkeypatch.setenv(KEY, "secret")
    exit_code, shown = doctor(capsys, WHERE[where])
    assert exit_code == 0
    assert f"needs_key starts in {where}" in shown["credentials"]
    # It has no check(), whatever wraps it.
    known = "can score the training prompts is not known: no method check(prompts) says so."
    assert f"Whether needs_key {known}" in shown["data"]
    assert "needs_key can score every" not in shown["data"]


@pytest.mark.parametrize("where", WHERE)
def test_a_key_that_a_reward_lacks_when_it_starts_is_failed(where, monkeypatch, capsys):
    monkeypatch.delenv(KEY, raising=False)
    exit_code, shown = doctor(capsys, WHERE[where])
    assert exit_code == 1
    assert f"KeyError: '{KEY}'" in shown["credentials"]
    assert shown["summary"].strip() == "Do not start yet: credentials failed."


RECORDING = ("code_rewards.RecordsHooks", {"file": "hooks.txt"})


@pytest.mark.parametrize("make", [in_worker, rewarded])
@pytest.mark.parametrize("is_accuracy", [False, True])
def test_offline_no_reward_of_the_user_s_is_started(make, is_accuracy, capsys):
    reward = make(RECORDING[0], **RECORDING[1])
    if is_accuracy:
        (key, value) = reward.split("=", 1)
        reward = f"--model.evaluation.accuracy={value[1:-1]}"
    which = "held-out" if is_accuracy else "training"
    exit_code, shown = doctor(capsys, reward, "--offline")
    assert exit_code == 0
    assert "records_hooks: not started (--offline)" in shown["credentials"]
    known = f"can score the {which} prompts is not known: it was not started, as credentials says."
    assert f"Whether records_hooks {known}" in shown["data"]
    assert not Path("hooks.txt").exists()
    exit_code, shown = doctor(capsys, reward)
    assert exit_code == 0
    assert f"records_hooks can score every {which} prompt" in shown["data"]
    assert Path("hooks.txt").read_text().count("check") == 1


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
        "constant": (f"{__name__}.Constant", {"only_sources": ["verifiable"], "value": 1.0}),
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


class Constant(Reward):
    """Give every completion the same value."""

    def __init__(self, value: float, **settings) -> None:
        super().__init__(**settings)
        self.value = value

    def score(self, prompt, completion):
        return self.value


# Random weights seldom end: a quarter of their tokens do here.
ENDING = "--model.sampling.stop_token_ids=[" + ",".join(map(str, range(64, 128))) + "]"


def probe(capsys, value: float) -> tuple[int, dict[str, str]]:
    reward = rewarded(f"{__name__}.Constant", value=value)
    settings = [ENDING, "--model.sampling.max_tokens=24", "--model.group_size=4"]
    return doctor(capsys, "--probe", reward, *settings)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_task_that_is_too_hard_or_too_easy_is_a_remark(value, capsys):
    exit_code, shown = probe(capsys, value)
    assert exit_code == 0
    assert shown["summary"].strip() == "Ready to start, with remarks on data, probe."
    assert re.search(r"remark probe .* the rewards differ in 0% of the groups", shown["probe"])


def test_a_value_that_depends_on_no_completion_is_failed(capsys):
    exit_code, shown = probe(capsys, 0.25)
    assert exit_code == 1
    assert "Reward 'constant' gives different completions" in shown["probe"]
    assert "mean reward 0.25" in shown["probe"]


class Broken(Reward):
    """Read a column that there is not."""

    def score(self, prompt, completion):
        return float(prompt.columns["keywords"] in completion.text)


def test_a_bug_of_a_reward_is_said_once_and_no_service_is_blamed(capsys):
    exit_code, shown = doctor(capsys, "--probe", rewarded(f"{__name__}.Broken"))
    assert exit_code == 1
    assert shown["probe"].count("KeyError: 'keywords'") == 1
    assert "no completion has a reward" in shown["probe"]
    assert "Fix the code of the reward" in shown["probe"]
    assert "nan" not in shown["probe"]
    assert "credentials" not in shown["probe"]


def close(completions, answer, **columns):
    """Compare with gold answers that must be numbers."""
    return [-abs(len(text) - int(gold)) for text, gold in zip(completions, answer, strict=True)]


def shortness(completions):
    return [-len(one) for one in completions]


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
    assert "1 of 2 training prompts end with a turn of the assistant" in shown["data"]


class OfSomePrompts(Reward):
    """Score the prompts that begin with 1 only."""

    def score(self, prompt, completion):
        return len(completion.text) if prompt.text.startswith("1") else None


class OfSomeCompletions(Reward):
    """Score the first completions of each prompt only."""

    def score_group(self, prompt, completions):
        return [1.0, *[None for _ in completions[1:]]]


@pytest.mark.parametrize(
    ("kinds", "share"),
    [
        (["OfSomePrompts", "RestAll"], None),
        (["OfSomePrompts"], "50% of the scores of reward 'of_some_prompts'"),
        (["OfSomeCompletions", "RestAll"], "50% of the scores of reward 'of_some_completions'"),
    ],
    ids=["other rewards apply", "no other reward", "within a group"],
)
def test_prompts_to_which_a_reward_does_not_apply_lack_no_score(kinds, share, capsys):
    rows = write_rows(*({"prompt": f"{n % 2}+1=", "answer": "2"} for n in range(4)))
    rewards = [{"class_path": f"{__name__}.{kind}"} for kind in kinds]
    words = ["--probe", ENDING, "--model.sampling.max_tokens=24", "--model.group_size=2"]
    exit_code, shown = doctor(capsys, *rows, *words, f"--model.rewards={json.dumps(rewards)}")
    assert exit_code == 0
    if share is None:
        assert "ended as abstain" not in shown["probe"]
        assert "could not be scored" not in shown["probe"]
    else:
        why = f"{share} ended as abstain. Check why it declines to score them, unless that is"
        assert why in shown["probe"]


class RestAll(Reward):
    def score(self, prompt, completion):
        return len(completion.text)


class OnMostRows(Reward):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        return float(len(completion.text) if self.calls % 4 == 1 else "a word")


def test_a_probe_fails_if_a_run_would_stop_at_such_a_step(capsys):
    exit_code, shown = doctor(capsys, "--probe", rewarded(f"{__name__}.OnMostRows"))
    assert exit_code == 1
    assert "failed probe" in shown["probe"]
    assert "A run would stop at such a step" in shown["probe"]
    assert "6 of the 8 rows (75%) have no score, and model.outage" in shown["probe"]
    assert "Some rows" not in shown["probe"]
    assert shown["summary"].strip() == "Do not start yet: probe failed."
