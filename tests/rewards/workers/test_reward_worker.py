"""The functions of a worker process, called in this process."""

import atexit
import os
import pickle

import pytest
from code_rewards import Longest, RecordsHooks, RunCode
from tiny import completion, prompt

from lit_grpo.rewards import FunctionReward
from lit_grpo.rewards.workers import reward_worker


@pytest.fixture
def exit_hooks(monkeypatch):
    """Collect what would run at the exit of the process."""
    hooks = []
    monkeypatch.setattr(atexit, "register", hooks.append)
    return hooks


@pytest.fixture
def score(exit_hooks):
    """Start a reward and score a group; only grouped rewards may have several completions."""

    def start_and_score(reward, *texts, **columns):
        reward_worker.start(pickle.dumps(reward))
        return reward_worker.score(prompt(**columns), [completion(text=text) for text in texts])

    return start_and_score


@pytest.mark.parametrize(
    ("code", "outcome", "detail"),
    [
        ("raise SystemExit('bye')", "error", "SystemExit: bye"),
        ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
        ("def f(): f()\nf()", "error", "RecursionError"),
        ("value = 1 +", "error", "SyntaxError"),
        ("value = 'one'", "error", "returned 'one' (str"),
        ("value = float('nan')", "error", "finite value, got nan"),
        ("raise TimeoutError('of its own')", "timeout", "of its own"),
        ("value = None", "abstain", ""),
    ],
)
def test_what_the_reward_raises_or_returns_becomes_an_outcome(score, code, outcome, detail):
    (fields,) = score(RunCode(), code)
    assert (fields["value"], fields["outcome"]) == (None, outcome)
    assert detail in fields["detail"]


def test_too_little_memory_is_a_bug_that_names_the_limit_of_a_worker(score):
    (fields,) = score(RunCode(), "raise MemoryError")
    assert (fields["outcome"], fields["detail"], fields["is_permanent"]) == (
        "error", "MemoryError", True,
    )  # fmt: skip
    assert "at most max_memory_gb of its ProcessReward" in fields["bug"]


def test_a_value_has_the_seconds_of_its_call(score):
    (fields,) = score(RunCode(factor=2.0), "import time; time.sleep(0.01); value = 1.5")
    assert (fields["value"], fields["outcome"]) == (3.0, "ok")
    assert fields["seconds"] >= 0.01


def test_a_grouped_reward_compares_siblings(score):
    values = [fields["value"] for fields in score(Longest(), "a", "abc", "ab")]
    assert values == [0.0, 1.0, 0.0]


def test_a_grouped_reward_that_raises_fails_the_whole_group(score):
    outcomes = [fields["outcome"] for fields in score(Longest(), "a", "raise")]
    assert outcomes == ["error", "error"]


def test_hooks_run_in_the_worker_and_close_runs_at_its_exit(score, exit_hooks, tmp_path):
    file = tmp_path / "hooks"
    score(RecordsHooks(str(file)), "")
    assert reward_worker.check([prompt()]) is None
    assert reward_worker.check([prompt(answer=None)]) == "every prompt needs tests"
    exit_hooks[-1]()
    hooks = [line.split()[0] for line in file.read_text().splitlines()]
    assert hooks == ["start", "score", "check", "check", "close"]
    assert str(os.getpid()) in file.read_text()


def test_a_function_in_verls_form_is_found_again_by_its_path(score):
    reward = FunctionReward("code_rewards:runs", reward_kwargs={"points": 2.0})
    row = {"data_source": "sums", "reward_model": {"ground_truth": 4}}
    assert [score(reward, code, **row)[0]["value"] for code in ("value = 4", "value = 5")] == [2, 0]
    assert "data_source is missing" in reward_worker.check([prompt()])


def test_a_function_in_trls_form_is_found_again_by_its_path(score):
    reward = FunctionReward("code_rewards:lengths")
    assert [fields["value"] for fields in score(reward, "a", "abc")] == [1.0, 3.0]
