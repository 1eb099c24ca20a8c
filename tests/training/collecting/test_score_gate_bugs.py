"""Mistakes in a reward's code: they end a run at its first step and show where they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from cli_base import BASE
from run_logs import workplace

from lit_grpo.__main__ import main
from lit_grpo.runs.files.event_log import read_events
from lit_grpo.stopping import ExitCode

REWARDS = """
from lit_grpo.rewards import Reward


class MissingColumn(Reward):
    def score(self, prompt, completion):
        return self.matches(prompt)

    def matches(self, prompt):
        return float(prompt.columns["keywords"] == "")  # the faulty line


class Text(Reward):
    def score(self, prompt, completion):
        return "0.5"


class NotANumber(Reward):
    async def score(self, prompt, completion):
        return float("nan")


class TooFew(Reward):
    def score_group(self, prompt, completions):
        return [1.0]


class WrongSignature(Reward):
    async def score(self, completion):
        return 1.0


def of_one(completion):
    return 1.0


def one_value(completions, **kwargs):
    return float("4" in completions[0])


class Occasional(Reward):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        return {1: 0.5, 2: 1.0, 3: 0.5}[self.calls % 4]


class OfTwoKinds(Reward):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        if self.calls % 8 == 1:
            raise IndexError("the first")
        if self.calls % 8 == 5:
            raise AttributeError("the second")
        return 0.5 * (self.calls % 3)


class DownLater(Reward):
    calls = 0

    async def score(self, prompt, completion):
        self.calls += 1
        return {"choices": 1.0}["choices" if self.calls <= 4 else "error"]


class BrokenLater(Reward):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        return {"choices": 1.0}["choices" if self.calls <= 4 else "error"]


class OnMostRows(Reward):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        return float("1" if self.calls % 4 == 1 else "a word")  # three of four rows


class OutOfReach(Reward):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        if self.calls == 1:
            raise ValueError("no number")
        if self.calls <= 4:
            raise ConnectionError("the service is gone")
        return 1.0

"""


@pytest.fixture(autouse=True)
def _workplace(tmp_path):
    with workplace(tmp_path) as patch:
        patch.delitem(sys.modules, "buggy_rewards", raising=False)
        Path("buggy_rewards.py").write_text(REWARDS)
        Path("base.yaml").write_text(yaml.safe_dump(BASE))
        yield


def fit(reward: str, *arguments: str) -> tuple[int, str]:
    """Train two steps of four rows; return the exit code and the run's log."""
    rewards = f"--model.rewards=[{reward}]"
    exit_code = main(["fit", "--config=base.yaml", "--run_dir=run", rewards, *arguments])
    return exit_code, Path("run/run.log").read_text()


ONE_VALUE = "{class_path: FunctionReward, init_args: {function: 'buggy_rewards:one_value'}}"
PROCESS = "{class_path: ProcessReward, init_args: {reward: buggy_rewards.MissingColumn}}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        ("buggy_rewards.MissingColumn", "KeyError: 'keywords'"),
        (PROCESS, "KeyError: 'keywords'"),
        ("buggy_rewards.Text", "returned '0.5' (str of length 3), not a number"),
        ("buggy_rewards.NotANumber", "needs a finite value, got nan"),
        ("buggy_rewards.TooFew", "TooFew.score_group (buggy_rewards.py, line 24) returned 1 value"),
        (ONE_VALUE, "one_value (buggy_rewards.py, line 37) returned 0.0 (float) for 2 completions"),
    ],
    ids=lambda text: text[:40],
)
def test_a_bug_on_every_row_ends_the_run_at_its_first_step(reward, shown):
    exit_code, log = fit(reward)
    assert exit_code == ExitCode.CRASHED
    stop = log[log.index("Stopped because of a bug in reward") :]
    assert shown in stop
    assert "gave no value" not in log
    assert "lit-grpo rewards run." in stop
    assert "RUN" not in log
    assert "with the columns" in stop
    assert "Row addition:" in stop
    assert "Retrying" not in log
    assert not Path("run/metrics.csv").exists()


OF_ONE = ONE_VALUE.replace("one_value", "of_one")


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        ("buggy_rewards.WrongSignature", "Define async def score(self, prompt, completion)."),
        (OF_ONE, "def of_one(completions, **columns)."),
        (
            f"{{class_path: ProcessReward, init_args: {{reward: {OF_ONE}}}}}",
            "got of_one(completion)",
        ),
    ],
    ids=["class", "function", "worker"],
)
def test_a_wrong_signature_is_one_line_before_anything_is_loaded(reward, shown, capsys):
    assert main(["fit", "--config=base.yaml", f"--model.rewards=[{reward}]"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert shown in line
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "reward",
    [
        pytest.param("buggy_rewards.MissingColumn", id="here"),
        pytest.param(PROCESS, id="worker", marks=pytest.mark.slow),
    ],
)
def test_the_traceback_begins_in_the_users_file_and_names_the_line(reward):
    _, log = fit(reward)
    line = 1 + REWARDS.splitlines().index(
        '        return float(prompt.columns["keywords"] == "")  # the faulty line'
    )
    first, *_ = log.partition("Traceback (most recent call last):\n")[2].splitlines()
    assert "buggy_rewards.py" in first
    assert f'buggy_rewards.py", line {line}, in matches' in log
    assert "lit_grpo/rewards/scoring" not in log


def test_on_error_raise_shows_the_bug_as_well():
    reward = "{class_path: buggy_rewards.MissingColumn, init_args: {on_error: raise}}"
    exit_code, log = fit(reward)
    assert exit_code == ExitCode.SCORES_ABSENT
    assert "its on_error is 'raise'" in log
    assert 'buggy_rewards.py", line' in log[log.index("Stopped: ") :]
    outcomes = pd.read_parquet("run/completions")["outcome/missing_column"]
    assert outcomes[0] == "error"
    assert set(outcomes) <= {"error", "timeout"}  # some were not asked for any more


def test_an_occasional_bug_is_an_outcome_with_one_traceback():
    exit_code, log = fit("buggy_rewards.Occasional")
    assert exit_code == 0
    assert log.count("Traceback (most recent call last)") == 1
    assert log.count("KeyError: 0") == 3  # in the message, the traceback and at the end
    rows = pd.read_parquet("run/completions")
    assert sorted(rows["outcome/occasional"]) == ["error"] * 2 + ["ok"] * 6
    assert rows.loc[rows["outcome/occasional"] == "error", "reward"].isna().all()


def test_occasional_bugs_of_two_kinds_have_a_traceback_each():
    exit_code, log = fit("buggy_rewards.OfTwoKinds")
    assert exit_code == 0
    assert log.count("Traceback (most recent call last)") == 2
    assert log.count("\nIndexError: the first") == log.count("\nAttributeError: the second") == 1
    rows = pd.read_parquet("run/completions")
    assert (rows["outcome/of_two_kinds"] == "error").sum() == len(rows) // 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "reward",
    [
        "buggy_rewards.OnMostRows",
        "{class_path: ProcessReward, "
        "init_args: {reward: buggy_rewards.OnMostRows, num_workers: 1}}",
    ],
    ids=["here", "worker"],
)
def test_a_bug_on_most_rows_ends_the_run_at_once_with_the_row_and_the_line(reward):
    exit_code, log = fit(reward)
    assert exit_code == ExitCode.CRASHED
    assert "Retrying" not in log
    stop = log[log.index("Stopped because of a bug in reward 'on_most_rows' on 3 of the 4 rows") :]
    assert "Row addition:" in stop
    lines = REWARDS.splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if "# three of four rows" in text)
    assert f'buggy_rewards.py", line {line}, in score' in stop
    assert "ValueError: could not convert string to float: 'a word'" in stop
    assert "raise model.outage.max_absent_fraction" in stop
    assert not Path("run/metrics.csv").exists()


def test_a_run_may_train_on_what_a_bug_leaves_without_asking_again():
    words = ["--data.prompts_per_step=1", "--model.group_size=8"]
    words += ["--model.outage.max_absent_fraction=0.75"]
    exit_code, log = fit("buggy_rewards.OnMostRows", *words)
    assert exit_code == 0
    assert "Retrying" not in log
    rows = pd.read_parquet("run/completions")
    assert sorted(rows["outcome/on_most_rows"]) == ["error"] * 12 + ["ok"] * 4
    assert rows["reward"].isna().sum() == 12


def test_a_bug_of_a_sync_reward_that_has_worked_before_ends_the_run_at_once():
    exit_code, log = fit("buggy_rewards.BrokenLater")
    assert exit_code == ExitCode.CRASHED
    assert "Retrying" not in log
    assert "Stopped because of a bug in reward 'broken_later' on every row" in log


def test_a_step_that_a_bug_ends_has_completions_and_no_metrics(capsys):
    callbacks = [f"--trainer.callbacks+={name}" for name in ("TimingLog", "LearningRateMonitor")]
    exit_code, log = fit("buggy_rewards.BrokenLater", *callbacks)
    assert exit_code == ExitCode.CRASHED
    assert (
        "The step was not trained on; the rows that were being scored are in completions/." in log
    )
    assert "Resume after 1 step" in log
    assert pd.read_csv("run/metrics.csv")["step"].tolist() == [0]
    rows = pd.read_parquet("run/completions").groupby("step")
    assert rows["outcome/broken_later"].unique().map(list).tolist() == [["ok"], ["error"]]
    assert rows["advantage"].count().tolist()[1] == 0
    capsys.readouterr()
    assert main(["report", "run"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "1"


def test_an_outage_heals_while_rows_with_a_bug_are_not_asked_again():
    exit_code, log = fit("buggy_rewards.OutOfReach", "--trainer.max_steps=1")
    assert exit_code == 0
    assert log.count("Retrying now") == 1
    rows = pd.read_parquet("run/completions")
    assert rows["outcome/out_of_reach"].tolist() == ["error", "ok", "ok", "ok"]


def test_an_exception_of_an_async_reward_that_has_worked_before_is_an_outage(capsys):
    words = ["--model.outage.give_up_after_seconds=0", "--trainer.enable_progress_bar=true"]
    exit_code, log = fit("buggy_rewards.DownLater", *words)
    shown = capsys.readouterr().out
    assert "step 1/2" in shown
    assert "step 2/2" not in shown  # it was left undone
    assert exit_code == ExitCode.SCORES_ABSENT
    assert "Resume after 1 step with: lit-grpo fit run" in log
    assert "too many scores are missing" in log
    assert "(100%)" in log
    assert "max_absent_fraction" not in log
    assert len(pd.read_csv("run/metrics.csv")["policy/loss"].dropna()) == 1
    assert "the rows that were being scored are in completions/." in log
    rows = pd.read_parquet("run/completions/step_000001.parquet")
    assert rows["outcome/down_later"].tolist() == ["error"] * 4
    assert rows["detail/down_later"].str.contains("KeyError: 'error'").all()
    assert rows["completion"].str.len().all()
    assert rows["advantage"].isna().all()


def test_a_bug_in_a_reward_that_is_only_logged_does_not_end_the_run():
    monitor = "{class_path: buggy_rewards.MissingColumn, init_args: {weight: 0.0}}"
    exit_code, log = fit(f"MathReward, {monitor}")
    assert exit_code == 0
    assert log.count("Traceback (most recent call last)") == 1


ACCURACY = "--model.evaluation.accuracy=buggy_rewards."


def test_a_bug_in_the_accuracy_ends_the_run_before_it_trains(capsys):
    exit_code, _ = fit(
        "MathReward", "--model.evaluation.before_training=true", f"{ACCURACY}MissingColumn"
    )
    assert exit_code == ExitCode.CRASHED
    shown = capsys.readouterr().err
    assert "the accuracy 'missing_column' has a bug. Row addition" in shown
    assert 'buggy_rewards.py", line' in shown
    assert "lightning" not in shown
    assert not Path("run/metrics.csv").exists()


def test_a_bug_in_the_accuracy_that_shows_later_ends_the_run_with_a_checkpoint():
    checked = ["--trainer.val_check_interval=1", f"{ACCURACY}MissingColumn"]
    exit_code, log = fit("MathReward", *checked)
    assert exit_code == ExitCode.CRASHED
    assert "Stopped at an evaluation: the accuracy 'missing_column' has a bug" in log
    assert "Resume after 1 step with: lit-grpo fit run" in log
    assert len(pd.read_csv("run/metrics.csv")["policy/loss"].dropna()) == 1


def test_an_accuracy_that_has_worked_may_fail_later():
    exit_code, log = fit(
        "MathReward",
        "--trainer.val_check_interval=1",
        "--data.validation_size=4",
        f"{ACCURACY}DownLater",
    )
    assert exit_code == 0
    assert "(logged once; val/unscored_fraction counts them)" in log
    left_out = "100% of the held-out completions could not be scored (val/unscored_fraction)."
    assert log.count(f"{left_out} val/accuracy is not known.") == 1
    assert log.count(f"Up to {left_out} val/accuracy leaves them out.") == 1  # at the end
    assert log.count(left_out) == 2
    warned = [one.message for one in read_events("run") if one.kind == "warning"]
    assert sum(one.startswith(left_out) for one in warned) == 1
    card = Path("run/final/README.md").read_text()
    assert ", without up to 100% that could not be scored |" in card
    val = pd.read_csv("run/metrics.csv")["val/unscored_fraction"].dropna()
    assert val.tolist() == [0.0, 1.0]
