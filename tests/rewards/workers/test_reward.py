import os
import sys

import jsonargparse
import pytest
from code_rewards import (
    HasState,
    HoldsLambda,
    IsAsync,
    LongerOfTwo,
    Longest,
    NeedsSandbox,
    RecordsHooks,
    RunCode,
)
from paths import SUPPORT
from processes import LIT_GRPO, run_program
from tiny import LLAMA, completion, prompt
from worker_processes import guards_of, wait_until

from lit_grpo.rewards import ProcessReward, Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import UserError

FINE = "value = 1.5"


def score_all(suite, *texts, **columns):
    """Return the first reward's scores of a group of one completion for each text."""
    prompts = [prompt(id=f"p{number}", **columns) for number in range(len(texts))]
    batch = suite.score(prompts, [[completion(text=text)] for text in texts])
    return [group.scores[suite.rewards[0].name][0] for group in batch.groups]


def values(scores):
    return [one.value for one in scores]


@pytest.fixture(scope="module")
def suite():
    rewards = [ProcessReward(kind, num_workers=1) for kind in (RunCode(), Longest())]
    with RewardSuite(rewards) as started:
        yield started


# Scores


def test_prompt_completion_and_score_arrive_whole(suite):
    code = (
        "from lit_grpo.types import Score\n"
        "assert prompt.columns['tests'] == ['a' * 10**6] and prompt.answer == '2'\n"
        "value = Score(value=0.1, detail='d' * 10**6, cost=0.25)\n"
    )
    (score,) = score_all(suite, code, tests=["a" * 10**6])
    assert (score.value, score.detail, score.cost) == (0.1, "d" * 10**6, 0.25)
    assert score.seconds > 0


def test_row_that_cannot_be_pickled_is_an_error_of_its_own(suite):
    (score,) = score_all(suite, FINE, unpicklable=lambda: None)
    assert (score.value, score.outcome) == (None, "error")
    assert "pickle" in score.detail
    assert values(score_all(suite, FINE)) == [1.5]


@pytest.mark.slow
def test_crash_is_an_error_of_that_completion_and_the_worker_is_replaced(suite):
    before, crashed, after = score_all(suite, FINE, "import os; os._exit(3)", FINE)
    assert (crashed.value, crashed.outcome) == (None, "error")
    assert "the worker died (exit code 3)" in crashed.detail
    assert (before.value, after.value) == (1.5, 1.5)


@pytest.mark.slow
def test_crash_of_a_grouped_reward_is_an_error_of_the_whole_group(suite):
    texts = [("a", "abc", "ab"), ("crash", "a", "b"), ("ab", "a", "ab")]
    batch = suite.score(
        [prompt(id=str(number)) for number in range(3)],
        [[completion(text=text) for text in group] for group in texts],
    )
    assert batch.parts["longest"][[0, 2]].tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    outcomes = [str(one.outcome) for one in batch.groups[1].scores["longest"]]
    assert outcomes == ["error"] * 3


def test_reward_is_started_checked_and_closed_in_its_worker(tmp_path):
    file = tmp_path / "hooks"
    with RewardSuite([ProcessReward(RecordsHooks(str(file)), num_workers=1)]) as suite:
        suite.check([prompt()])
        assert values(score_all(suite, "", "")) == [1.0, 1.0]
        with pytest.raises(ValueError, match="every prompt needs tests"):
            suite.check([prompt(answer=None)])
    hooks, processes = zip(*map(str.split, file.read_text().splitlines()), strict=True)
    assert hooks == ("start", "check", "score", "score", "check", "close")
    assert len(set(processes)) == 1
    assert processes[0] != str(os.getpid())


@pytest.mark.slow
def test_reward_can_be_started_again_after_close():
    suite = RewardSuite([ProcessReward(RunCode(), num_workers=1)])
    others = guards_of(os.getpid())
    for _ in range(2):
        with suite:
            assert values(score_all(suite, FINE)) == [1.5]
        wait_until(lambda: guards_of(os.getpid()) <= others)


TRAINER = r"""
from code_rewards import RunCode
from tiny import completion, prompt
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.rewards.workers.reward import ProcessReward

suite = RewardSuite([ProcessReward(RunCode(), num_workers=1)])
suite.start()
assert suite.score([prompt()], [[completion(text="value = 1.5")]]).valid.all()
"""


@pytest.mark.slow
def test_trainer_that_does_not_close_its_rewards_exits_without_messages():
    done = run_program([sys.executable, "-c", TRAINER], SUPPORT)
    assert (done.stdout, done.stderr) == ("", "")


# Settings


def test_reward_keeps_its_name_and_its_way_of_grouping():
    outer = ProcessReward(RunCode(factor=2.0), weight=0.5, on_error="drop_group")
    assert (outer.name, outer.weight, outer.on_error) == ("run_code", 0.5, "drop_group")
    assert ProcessReward(RunCode(name="tests")).name == "tests"
    assert ProcessReward(RunCode(), name="tests").name == "tests"
    assert (outer.is_grouped, outer.siblings_per_call) == (False, None)
    grouped = ProcessReward(LongerOfTwo())
    assert (grouped.is_grouped, grouped.siblings_per_call) == (True, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ProcessReward(IsAsync()),
            "must be sync .* is_async is async .* without ProcessReward",
        ),
        (lambda: ProcessReward(ProcessReward(RunCode())), "run_code is async"),
        (lambda: ProcessReward(HasState()), "has_state has state_dict .* without ProcessReward"),
        (lambda: ProcessReward(Reward()), "must override score or score_group"),
        (lambda: ProcessReward(RunCode), r"ProcessReward.init_args.reward .* Give RunCode\(\)"),
        (lambda: ProcessReward(RunCode(weight=2)), "weight must be set on ProcessReward, got 2"),
        (lambda: ProcessReward(RunCode(on_error="raise")), "Move on_error to the init_args"),
        (lambda: ProcessReward(RunCode(), num_workers=0), "num_workers must be >= 1, got 0"),
        (lambda: ProcessReward(RunCode(), deadline_seconds=0), "deadline_seconds must be positive"),
        (lambda: ProcessReward(RunCode(), max_memory_gb=-1), "max_memory_gb must be positive"),
    ],
)
def test_unsuitable_reward_or_limit_is_refused_with_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (HoldsLambda(), ValueError, "holds_lambda is not .*lambda.* in its start"),
        (NeedsSandbox(), UserError, "FileNotFoundError: no sandbox at nowhere/sandbox.*Define"),
    ],
)
def test_reward_that_cannot_start_in_a_worker_stops_the_run_with_the_cause(reward, error, message):
    others = guards_of(os.getpid())
    with pytest.raises(error, match=message):
        RewardSuite([ProcessReward(reward)]).start()
    wait_until(lambda: guards_of(os.getpid()) <= others)


# Configs


CONFIG = {
    "class_path": "lit_grpo.rewards.workers.reward.ProcessReward",
    "init_args": {
        "reward": {"class_path": "my_rewards.RunTests", "init_args": {"points": 2.0}},
        "deadline_seconds": 20,
        "max_memory_gb": None,
        "weight": 0.5,
    },
}
MY_REWARDS = """
from lit_grpo.rewards import Reward

class RunTests(Reward):
    def __init__(self, points: float = 1.0, **settings):
        super().__init__(**settings)
        self.points = points

    def score(self, prompt, completion):
        return self.points * float(len(completion.text) % 2)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with a reward class."""
    (tmp_path / "my_rewards.py").write_text(MY_REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_reward_of_the_working_directory_can_be_configured(project, monkeypatch):
    monkeypatch.syspath_prepend(project)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)  # that of another test
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=list[Reward])
    parsed = parser.parse_object({"rewards": [CONFIG]})
    (reward,) = parser.instantiate_classes(parsed).rewards
    assert (reward.name, reward.weight, reward.reward.points) == ("run_tests", 0.5, 2.0)
    with RewardSuite([reward]) as suite:
        assert values(score_all(suite, "odd", "even")) == [2.0, 0.0]


@pytest.mark.slow
def test_a_run_trains_on_a_reward_in_processes(project):
    import yaml

    config = {
        "trainer": {"accelerator": "cpu", "max_steps": 1, "limit_val_batches": 0},
        "model": {
            "policy": {"path": None, "architecture": LLAMA},
            "sampling": {"max_tokens": 4},
            "group_size": 4,
            "rewards": [CONFIG],
        },
        "data": {"class_path": "AdditionData", "init_args": {"prompts_per_step": 2}},
    }
    (project / "run.yaml").write_text(yaml.safe_dump(config))
    run_program([*LIT_GRPO, "fit", "--config=run.yaml", "--run_dir=run"])
    header, row = (project / "run/metrics.csv").read_text().splitlines()
    metrics = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(metrics["reward/run_tests/ok_fraction"]) == 1.0
