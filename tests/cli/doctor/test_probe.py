"""A small rollout that ``lit-grpo doctor --probe`` tries: its signal, its failures and its time."""

from __future__ import annotations

import json
import re

import pytest
from doctor_runs import doctor, rewarded, write_rows

from lit_grpo.rewards import Reward
from lit_grpo.rollout import HFEngine

# Random weights seldom end: a quarter of their tokens do here.
ENDING = "--model.sampling.stop_token_ids=[" + ",".join(map(str, range(64, 128))) + "]"


def probe(capsys, value: float) -> tuple[int, dict[str, str]]:
    reward = rewarded("code_rewards.Constant", value=value)
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


def test_completions_that_are_cut_off_are_remarked_also_if_their_rewards_differ(capsys):
    rare = "--model.sampling.stop_token_ids=[64]"
    reward = rewarded("small_runs.ShareOfLowBytes")
    words = ["--probe", reward, rare, "--model.sampling.max_tokens=3", "--model.group_size=4"]
    exit_code, shown = doctor(capsys, *words)
    assert exit_code == 0
    assert "the rewards differ in 100% of the groups" in shown["probe"]
    assert re.search(r"remark probe .*Raise model.sampling.max_tokens, unless", shown["probe"])


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


def test_every_source_of_a_mixture_is_probed_however_many_and_rare(capsys):
    names = [f"of{number}" for number in range(6)]
    one = {"class_path": "AdditionData", "init_args": {"num_digits": 1, "validation_size": 2}}
    sources = {name: {"data": one, "weight": 11.0 if name == "of0" else 1.0} for name in names}
    settings = {"prompts_per_step": 16, "sources": sources}
    data = {"class_path": "MixtureData", "init_args": settings}
    rewards = [
        {"class_path": f"{__name__}.RestAll"},
        {"class_path": f"{__name__}.Broken", "init_args": {"only_sources": ["of5"]}},
    ]
    words = [f"--data={json.dumps(data)}", f"--model.rewards={json.dumps(rewards)}"]
    exit_code, shown = doctor(capsys, "--probe", ENDING, *words)
    assert exit_code == 1
    assert "completions of 6 prompts" in shown["probe"]
    assert "KeyError: 'keywords'" in shown["probe"]


class BrokenEngine(HFEngine):
    """Fail when it is to sample."""

    def generate(self, prompts, group_size, sampling, *, seed):
        yield 0, sampling.no_such_setting


def test_a_bug_of_an_engine_is_said_with_the_line_of_its_code(capsys):
    exit_code, shown = doctor(capsys, "--probe", f"--model.engine={__name__}.BrokenEngine")
    assert exit_code == 1
    assert f"failed probe {__name__}.BrokenEngine.generate (" in shown["probe"]
    assert shown["probe"].strip().endswith("has no attribute 'no_such_setting'. Fix that code.")


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
        why = f"{share} ended as abstain. It returned None: check whether a return is missing"
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


def test_a_probe_says_whether_there_is_a_signal_and_how_long_the_run_takes(capsys):
    low = "--model.rewards=[small_runs.ShareOfLowBytes]"
    exit_code, shown = doctor(capsys, "--probe", low, "--model.group_size=4")
    assert exit_code == 0
    found = re.search(r"16 completions of 4 prompts: the rewards differ in (\d+)%", shown["probe"])
    assert found
    assert int(found[1]) > 0
    assert re.search(r"tokens/s; a rollout step of 8 completions takes about .* the run about",
                     shown["probe"])  # fmt: skip
    assert shown["probe"].count("Sampled for prompt 'addition:") == 2
    two = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    exit_code, shown = doctor(capsys, "--probe", *two)
    assert "on 2 processes with 1 each" in shown["batch"]
    assert "a rollout step of 2 completions" in shown["probe"]
    assert exit_code == 1  # random weights stop nowhere
    assert "There is no signal: every reward is exactly 0" in shown["probe"]
