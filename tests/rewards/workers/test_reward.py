import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import code_rewards
import jsonargparse
import pytest
from code_rewards import (
    Counts,
    Diary,
    HoldsLambda,
    LongerOfTwo,
    Longest,
    NeedsSandbox,
    RunCode,
    Waits,
)
from paths import SUPPORT
from tiny import LLAMA, completion, prompt
from worker_processes import guards_of, is_alive, is_busy, wait_until, workers_of

from lit_grpo.rewards import FunctionReward, ProcessReward, Reward
from lit_grpo.rewards.scoring import RewardSuite

FINE = "value = 1.5"


def score_all(suite, *texts, **columns):
    """The scores of a group of one for each text."""
    prompts = [prompt(id=f"p{number}", **columns) for number in range(len(texts))]
    batch = suite.score(prompts, [[completion(text=text)] for text in texts])
    return [group.scores[suite.rewards[0].name][0] for group in batch.groups]


def values(scores):
    return [one.value for one in scores]


@pytest.fixture(scope="module")
def suite():
    reward = ProcessReward(RunCode(), num_workers=1, deadline_seconds=60, max_memory_gb=1)
    with RewardSuite([reward]) as started:
        yield started


@pytest.fixture
def impatient():
    with RewardSuite([ProcessReward(RunCode(), num_workers=1, deadline_seconds=3)]) as started:
        yield started


def only_worker(suite):
    """The process that scores, which it says itself."""
    (score,) = score_all(suite, "value = float(process)")
    return int(score.value)


# What code may do to its process


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os.kill(process, 9)", "exit code 137, SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "exit code 139, SIGSEGV"),
        ("import os; os.fork() or os.setsid() or __import__('time').sleep(3); os._exit(4)",
         "exit code 4"),
    ],
)  # fmt: skip
def test_crash_is_an_error_of_that_sample_and_the_worker_is_replaced(suite, code, cause):
    before, crashed, after = score_all(suite, FINE, code, FINE)
    assert (crashed.value, crashed.outcome) == (None, "error")
    assert f"the worker died ({cause})" in crashed.detail
    assert (before.value, after.value) == (1.5, 1.5)


@pytest.mark.parametrize(
    ("code", "outcome", "detail"),
    [
        ("value = bytearray(2**31)", "error", "MemoryError"),
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
def test_what_the_reward_raises_or_returns_is_an_outcome_and_its_worker_goes_on(
    suite, code, outcome, detail
):
    worker = only_worker(suite)
    (score,) = score_all(suite, code)
    assert (score.value, score.outcome) == (None, outcome)
    assert detail in score.detail
    assert only_worker(suite) == worker


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "9 ** 9 ** 9",  # in C, without letting any other thread run
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_hang_is_a_timeout_of_that_sample_and_the_worker_is_replaced(impatient, code):
    hung, after = score_all(impatient, code, FINE)
    assert (hung.value, hung.outcome) == (None, "timeout")
    assert "no answer within 3 s (deadline_seconds); the worker was killed" in hung.detail
    assert after.value == 1.5


def test_everything_that_a_hung_call_started_is_killed_with_it(impatient, tmp_path):
    code = (
        "import pathlib, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    (hung,) = score_all(impatient, code)
    assert hung.outcome == "timeout"
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(child))


@pytest.mark.parametrize(
    "code",
    [
        "print('{\"result\": 0}' * 9999, flush=True); value = 1.5",
        "import os; os.write(1, b'x' * 99); os.write(2, b'y'); value = 1.5",
        "import os; os.system('echo 0'); value = 1.5",
        "import sys; value = 1.5 + len(sys.stdin.read())",
        "import subprocess; value = 1.5 + len(subprocess.run('cat', capture_output=True).stdout)",
        "import os; os.fork(); value = 1.5",
        "import signal; signal.alarm(600); signal.alarm(0); value = 1.5",
        "from multiprocessing import get_context\n"
        "child = get_context('fork').Process(target=int)\n"
        "child.start(); child.join(); value = 1.5 + child.exitcode",
    ],
)
def test_what_code_prints_reads_and_starts_does_not_reach_the_scores(suite, code):
    assert values(score_all(suite, code, "value = 2.5", FINE)) == [1.5, 2.5, 1.5]


def test_worker_that_dies_between_two_calls_costs_no_sample(suite):
    worker = only_worker(suite)
    (guard,) = (pid for pid in guards_of(os.getpid()) if worker in children_of(pid))
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{guard}").exists())
    time.sleep(0.5)  # for the event loop to hear of it
    assert values(score_all(suite, FINE)) == [1.5]
    assert only_worker(suite) != worker


def children_of(pid):
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


# Scores as if the reward ran in the trainer


def test_prompt_completion_and_score_arrive_whole(suite):
    code = (
        "from lit_grpo.types import Score\n"
        "assert prompt.columns['tests'] == ['a' * 10**6] and prompt.answer == '2'\n"
        "value = Score(value=0.1, detail='d' * 10**6, cost=0.25)\n"
    )
    (score,) = score_all(suite, code, tests=["a" * 10**6])
    assert (score.value, score.detail, score.cost) == (0.1, "d" * 10**6, 0.25)
    assert score.seconds > 0


def test_row_that_cannot_cross_is_an_error_of_its_own(suite):
    (score,) = score_all(suite, FINE, unpicklable=lambda: None)
    assert (score.value, score.outcome) == (None, "error")
    assert "pickle" in score.detail
    assert values(score_all(suite, FINE)) == [1.5]


def test_several_workers_score_side_by_side_and_the_others_go_on(tmp_path):
    meet = (
        "import pathlib, time\n"
        "here, there = (pathlib.Path({folder!r}) / name for name in {names})\n"
        "here.touch()\n"
        "while not there.exists(): time.sleep(0.01)\n"
        "value = 1.0\n"
    )
    one = meet.format(folder=str(tmp_path), names=("a", "b"))
    other = meet.format(folder=str(tmp_path), names=("b", "a"))
    with RewardSuite([ProcessReward(RunCode(), num_workers=2, deadline_seconds=60)]) as suite:
        crash = "import os; os._exit(1)"
        scores = score_all(suite, one, other, crash, *[FINE] * 8)
        assert values(scores) == [1.0, 1.0, None, *[1.5] * 8]
        assert len(guards_of(os.getpid())) >= 2


def test_row_is_scored_alike_by_any_number_of_workers():
    codes = [f"value = float({number}) / 7" for number in range(20)]
    found = []
    for num_workers in (1, 3):
        with RewardSuite([ProcessReward(RunCode(), num_workers=num_workers)]) as suite:
            found.append(values(score_all(suite, *codes)))
    assert found[0] == found[1] == [number / 7 for number in range(20)]


def test_reward_keeps_its_name_and_what_it_was_made_with():
    outer = ProcessReward(RunCode(factor=2.0), weight=0.5, on_error="drop_group")
    assert (outer.name, outer.weight, outer.on_error) == ("run_code", 0.5, "drop_group")
    assert ProcessReward(RunCode(name="tests")).name == "tests"
    assert ProcessReward(RunCode(), name="tests").name == "tests"
    with RewardSuite([outer]) as suite:
        assert values(score_all(suite, FINE)) == [3.0]


def test_grouped_reward_compares_siblings_and_fails_as_a_group():
    with RewardSuite([ProcessReward(Longest(), num_workers=1)]) as suite:
        texts = [("a", "abc", "ab"), ("crash", "a", "b"), ("ab", "a", "ab")]
        batch = suite.score(
            [prompt(id=str(number)) for number in range(3)],
            [[completion(text=text) for text in group] for group in texts],
        )
    assert batch.valid.tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert batch.rewards[[0, 2]].tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    assert {str(one.outcome) for one in batch.groups[1].scores["longest"]} == {"error"}


def test_grouped_reward_gets_as_many_siblings_at_a_time_as_it_asks_for():
    with RewardSuite([ProcessReward(LongerOfTwo(), num_workers=1)]) as suite:
        group = [completion(text=text) for text in ("a", "abc", "ab", "abcd", "b")]
        assert suite.score([prompt()], [group]).rewards.tolist() == [[0.0, 1.0, 0.0, 1.0, 1.0]]


def test_reward_is_started_asked_and_closed_in_its_worker(tmp_path):
    diary = tmp_path / "diary"
    with RewardSuite([ProcessReward(Diary(str(diary)), num_workers=1)]) as suite:
        suite.check([prompt()])
        assert values(score_all(suite, "", "")) == [1.0, 1.0]
        with pytest.raises(ValueError, match="every prompt needs tests"):
            suite.check([prompt(answer=None)])
    hooks, processes = zip(*map(str.split, diary.read_text().splitlines()), strict=True)
    assert hooks == ("start", "check", "score", "score", "check", "close")
    assert len(set(processes)) == 1
    assert processes[0] != str(os.getpid())


def test_started_again_after_close_it_scores_again():
    suite = RewardSuite([ProcessReward(RunCode(), num_workers=1)])
    others = guards_of(os.getpid())
    for _ in range(2):
        with suite:
            assert values(score_all(suite, FINE)) == [1.5]
        assert guards_of(os.getpid()) == others


def test_close_kills_a_call_that_still_runs():
    others = guards_of(os.getpid())
    other_workers = workers_of(os.getpid())
    suite = RewardSuite([ProcessReward(RunCode(), num_workers=1)])
    suite.start()
    (worker,) = workers_of(os.getpid()) - other_workers
    suite.open([prompt()], 1).add(0, completion(text="while True: pass"))
    wait_until(lambda: is_busy(worker))
    suite.close()
    wait_until(lambda: not is_alive(worker))
    assert guards_of(os.getpid()) == others


TRAINER = r"""
import os, sys, time
from code_rewards import RunCode
from tiny import completion, prompt
from lit_grpo.rewards import RewardSuite
from lit_grpo.rewards.workers.reward import ProcessReward

suite = RewardSuite([ProcessReward(RunCode(), num_workers=1, deadline_seconds=600)])
suite.start()
if sys.argv[1] == "busy":
    code = "import subprocess; subprocess.Popen(['sleep', '600'])\n9 ** 9 ** 9"
    suite.open([prompt()], 1).add(0, completion(text=code))
if sys.argv[1] == "forks":
    if not os.fork():
        time.sleep(600)
    suite.close()
print("ready", flush=True)
if sys.argv[1] != "ends":
    time.sleep(600)
"""


def start_trainer(how):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, how],
        cwd=SUPPORT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout.readline() == "ready\n"
    return trainer


@pytest.mark.parametrize("how", ["idle", "busy"])
def test_nothing_is_left_when_the_trainer_is_killed(how):
    trainer = start_trainer(how)
    (guard,), (worker,) = guards_of(trainer.pid), workers_of(trainer.pid)
    family = {guard, worker}
    if how == "busy":
        wait_until(lambda: is_busy(worker))
        wait_until(lambda: children_of(worker))
        family |= children_of(worker)
    trainer.kill()
    trainer.communicate()
    wait_until(lambda: not any(map(is_alive, family)))


def test_workers_end_though_a_process_that_the_trainer_forked_holds_their_pipes():
    trainer = start_trainer("forks")
    assert not guards_of(trainer.pid)
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.communicate()


def test_trainer_that_forgets_to_close_ends_without_noise():
    trainer = start_trainer("ends")
    assert trainer.communicate(timeout=60)[1] == ""
    assert trainer.returncode == 0


# What cannot run in a process


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProcessReward(Waits()), "must be sync .* waits is async .* without ProcessReward"),
        (lambda: ProcessReward(ProcessReward(RunCode())), "run_code is async"),
        (lambda: ProcessReward(Counts()), "counts has state_dict .* without ProcessReward"),
        (lambda: ProcessReward(Reward()), "must override score or score_group"),
        (lambda: ProcessReward(RunCode(weight=2)), "weight must be set on ProcessReward, got 2"),
        (lambda: ProcessReward(RunCode(on_error="raise")), "Move on_error to the init_args"),
        (lambda: ProcessReward(RunCode(), num_workers=0), "num_workers must be positive, got 0"),
        (lambda: ProcessReward(RunCode(), deadline_seconds=0), "deadline_seconds must be positive"),
        (lambda: ProcessReward(RunCode(), max_memory_gb=-1), "max_memory_gb must be positive"),
    ],
)
def test_reward_or_limit_that_cannot_be_is_refused_with_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (HoldsLambda(), ValueError, "holds_lambda is not .*lambda.* in its start"),
        (NeedsSandbox(), RuntimeError, "FileNotFoundError: no sandbox at nowhere/sandbox"),
    ],
)
def test_reward_that_cannot_start_in_a_worker_stops_the_run_with_the_cause(reward, error, message):
    others = guards_of(os.getpid())
    with pytest.raises(error, match=message):
        RewardSuite([ProcessReward(reward)]).start()
    assert guards_of(os.getpid()) == others


# Functions, and configs


@pytest.mark.parametrize("path", ["code_rewards:runs", code_rewards.__file__ + ":runs"])
def test_function_of_verls_form_runs_in_a_worker(path):
    inner = FunctionReward(path, reward_kwargs={"points": 2.0})
    with RewardSuite([ProcessReward(inner, num_workers=1)]) as suite:
        row = {"data_source": "sums", "reward_model": {"ground_truth": 4}}
        scores = score_all(suite, "value = 4", "value = 5", "import os; os._exit(3)", **row)
        assert values(scores) == [2.0, 0.0, None]
        assert suite.rewards[0].name == "runs"
        with pytest.raises(ValueError, match="data_source is missing"):
            suite.check([prompt()])


def test_function_of_trls_form_runs_in_a_worker():
    with RewardSuite([ProcessReward(FunctionReward("code_rewards:lengths"))]) as suite:
        batch = suite.score([prompt()], [[completion(text="a"), completion(text="abc")]])
    assert batch.parts["lengths"].tolist() == [[1.0, 3.0]]


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
    """A user's working directory with a reward of his own."""
    (tmp_path / "my_rewards.py").write_text(MY_REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_reward_of_the_working_directory_is_composed_in_a_config(project, monkeypatch):
    monkeypatch.syspath_prepend(project)
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
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config=run.yaml", "--run_dir=run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    header, row = (project / "run/metrics.csv").read_text().splitlines()
    metrics = dict(zip(header.split(","), row.split(","), strict=True))
    assert float(metrics["reward/run_tests/ok_fraction"]) == 1.0
