"""What a user learns at the end of a run whose rewards failed on some rows."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
import yaml
from cli_base import BASE
from run_logs import workplace

from lit_grpo.__main__ import main
from lit_grpo.runs.files.completions import write_table
from lit_grpo.runs.report.failures import describe_failures
from lit_grpo.runs.report.history import Run

REWARDS = """
from lit_grpo.rewards import Reward

class Flaky(Reward):
    num_calls = 0

    def score(self, prompt, completion):
        self.num_calls += 1
        if self.num_calls % 5 == 0:
            raise ConnectionError("the sandbox is full")
        return float(self.num_calls % 3)

class Abstains(Reward):
    def score(self, prompt, completion):
        return None if completion.token_ids[0] % 2 else 1.0

class Forgetful(Reward):
    def score(self, prompt, completion):
        len(completion.text)

def rarely(completions, **kwargs):
    return [1.0 for _ in completions]
"""


@pytest.fixture(autouse=True)
def here(tmp_path):
    with workplace(tmp_path):
        Path("flaky_rewards.py").write_text(REWARDS)
        Path("base.yaml").write_text(yaml.safe_dump(BASE))
        yield tmp_path


def ended(rewards: str, *words: str) -> str:
    words = (f"--model.rewards={rewards}", "--run_dir=run", "--trainer.max_steps=8", *words)
    assert main(["fit", "--config=base.yaml", *words]) == 0
    _, _, end = Path("run/run.log").read_text().partition("max_steps is reached")
    return end


def expected_line() -> str:
    outcomes = pd.read_parquet("run/completions")["outcome/flaky"]
    num_failed, num_rows = int((outcomes == "error").sum()), len(outcomes)
    assert 0 < num_failed < num_rows
    return (
        f"Reward 'flaky' failed on {num_failed} of {num_rows} rows ({num_failed / num_rows:.1%}), "
        f"most often ({num_failed}) with error: ConnectionError: the sandbox is full "
        "(flaky_rewards.py, line 10). Read more: "
        "the columns outcome/flaky and detail/flaky of run/completions."
    )


def test_the_end_and_the_report_say_which_reward_failed_how_often_and_why(capsys):
    abstains = "{class_path: flaky_rewards.Abstains, init_args: {weight: 0}}"
    end = ended(f"[flaky_rewards.Flaky, {abstains}]")
    assert expected_line() in end
    assert "Reward 'abstains'" not in end
    capsys.readouterr()
    assert main(["report", "run"]) == 0
    assert expected_line() in capsys.readouterr().out


@pytest.mark.slow
def test_a_reward_that_has_always_returned_none_is_named_at_the_end():
    end = ended("[flaky_rewards.Flaky, flaky_rewards.Abstains, flaky_rewards.Forgetful]")
    assert "Reward 'forgetful' returned None for every completion, so it did not count" in end
    assert "Reward 'abstains'" not in end


@pytest.mark.slow
def test_a_resumed_run_counts_all_of_its_rows():
    ended("[flaky_rewards.Flaky]")
    earlier = expected_line()
    assert main(["fit", "run", "--trainer.max_steps=12"]) == 0
    assert expected_line() != earlier
    assert expected_line() in Path("run/run.log").read_text()


def test_rewards_that_did_not_fail_are_not_mentioned():
    function = "{class_path: FunctionReward, init_args: {function: 'flaky_rewards:rarely'}}"
    assert "failed on" not in ended(f"[{function}]")


def test_a_message_is_said_to_be_one_of_several(here):
    table = pa.table(
        {
            "outcome/flaky": ["error", "error", "error", "ok", "timeout"],
            "detail/flaky": ["ValueError: no", "got nan", "ValueError: no", "", "no answer"],
        }
    )
    write_table(table, here / "run" / "completions" / "step_000000.parquet")
    metrics = pd.DataFrame({"step": [0], "seconds": [1.0], "reward/flaky/error_fraction": [0.6]})
    run = Run(path=here / "run", label="run", metrics=metrics)
    (line,) = describe_failures(run)
    assert line.startswith(
        "Reward 'flaky' failed on 4 of 5 rows (80.0%), most often (3, 2 of them as here) with "
        "error: ValueError: no. Read more"
    )


def test_rows_of_sources_that_the_reward_is_not_for_are_not_counted(here):
    directory = here / "run" / "completions"
    table = pa.table(
        {
            "outcome/flaky": ["error", "ok", "other_source", "other_source", "abstain"],
            "detail/flaky": ["no answer", "", "", "", ""],
        }
    )
    write_table(table, directory / "step_000001.parquet")
    before_the_reward_was_added = pa.table({"outcome/other": ["ok", "ok"]})
    write_table(before_the_reward_was_added, directory / "step_000000.parquet")
    fractions = [None, 1 / 3]
    metrics = {"step": [0, 1], "seconds": [1.0, 2.0], "reward/flaky/error_fraction": fractions}
    (line,) = describe_failures(Run(path=here / "run", label="run", metrics=pd.DataFrame(metrics)))
    assert line.startswith(
        "Reward 'flaky' failed on 1 of 3 rows (33.3%), most often (1) with error"
    )
