"""``lit-grpo rescore`` on the completions of a real, tiny run."""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from cli_base import BASE
from judge_server import PRICE, REPLY_COST, JudgeServer
from run_logs import workplace
from terminal import shown_in_terminal

from lit_grpo.__main__ import main

MINE = """
from lit_grpo.rewards import Reward
from small_runs import ShareOfLowBytes

class Low(ShareOfLowBytes):
    pass

class Left(Reward):
    def score(self, prompt, completion):
        return prompt.columns["left"]

class Broken(Reward):
    def score(self, prompt, completion):
        raise RuntimeError("the sandbox is gone")

class Buggy(Reward):
    def score(self, prompt, completion):
        return prompt.columns["keywords"] in completion.text

class BuggyOnFirst(Reward):
    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        return prompt.columns["left" if self.calls > 6 else "keywords"]
"""
LOW = {"class_path": "rescored_rewards.Low"}
BROKEN = {"class_path": "rescored_rewards.Broken"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Three steps of 2 prompts and 4 completions, rewarded by the share of low bytes."""
    directory = tmp_path_factory.mktemp("finished")
    model = BASE["model"] | {"rewards": [LOW], "group_size": 4}
    config = BASE | {"model": model, "trainer": BASE["trainer"] | {"max_steps": 3}}
    (directory / "my.yaml").write_text(yaml.safe_dump(config))
    (directory / "rescored_rewards.py").write_text(MINE)
    with workplace(directory):
        assert main(["fit", "--config=my.yaml", "--run_dir=run"]) == 0
    return directory


@pytest.fixture(autouse=True)
def here(finished, here) -> Path:
    """A copy of the finished run."""
    shutil.copytree(finished, here, dirs_exist_ok=True)
    return here


def rescore(*arguments: str) -> int:
    return main(["rescore", "run", *arguments])


def rewards(*entries: dict, name: str = "more.yaml") -> str:
    Path(name).write_text(yaml.safe_dump({"model": {"rewards": list(entries)}}))
    return f"--config={name}"


def logged(step: int) -> pd.DataFrame:
    return pd.read_parquet(f"run/completions/step_{step:06d}.parquet")


def cells(shown: str, name: str) -> list[str]:
    return next(line for line in shown.splitlines() if line.startswith(name)).split()


def test_the_same_rewards_change_nothing_and_it_is_reported(capsys):
    assert rescore() == 0
    shown = capsys.readouterr().out
    assert "Nothing changed: all 24 completions have the same scores and outcomes" in shown
    assert shown.splitlines()[-1] == "Completions: run/rescored/rescored.parquet"
    frame = pd.read_parquet("run/rescored/rescored.parquet")
    before = pd.concat([logged(step) for step in range(3)], ignore_index=True)
    pd.testing.assert_series_equal(frame["reward"], before["reward"])
    assert frame["reward_before"].tolist() == before["reward"].tolist()
    assert frame["step"].tolist() == before["step"].tolist()


def test_a_negated_weight_reverses_every_order(capsys):
    negated = LOW | {"init_args": {"weight": -2.0}}
    assert rescore(rewards(negated)) == 0
    shown = capsys.readouterr().out
    frame = pd.read_parquet("run/rescored/more.parquet")
    assert frame["reward"].tolist() == [-2 * value for value in frame["reward_before"]]
    assert "is -1.000 on average" in shown
    mean = frame["reward_before"].mean()
    assert cells(shown, "weighted sum")[2:4] == [f"{mean:.3f}", f"{-2 * mean:.3f}"]
    assert cells(shown, "low")[1:] == [f"{mean:.3f}", f"{mean:.3f}", "0.0%"]
    top = frame["reward_before"].max()
    assert f"{top:.3g} → {-2 * top:.3g}" in shown


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_every_column_fits_a_terminal_and_completions_are_cut(here, columns, importer):
    for path in Path("run/completions").iterdir():
        table = pd.read_parquet(path)
        table["completion"] = ["so " * 60 + f"the answer is {n}" for n in range(len(table))]
        table.to_parquet(path)
    config = rewards(LOW | {"init_args": {"weight": -2.0, "name": "mentions_some_of_the_words"}})
    shown = shown_in_terminal(importer, "rescore", "run", config, cwd=here, columns=columns)
    start = shown.index(next(line for line in shown if line.startswith("changed most")))
    assert shown[start + 1].split() == ["reward", "step", "prompt", "completion"]
    rows = shown[start + 2 : start + 7]
    for row in rows:
        change = r" *[\d.]+ → -[\d.]+ +\d  addition:\S+ +"
        assert re.fullmatch(change + r"….*the answer is \d *", row)
        assert len(row) <= columns
    assert any(line.startswith("mentions_some_of_the_words") for line in shown)


def test_output_to_a_file_is_not_cut_to_a_width(here, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS")
    for path in Path("run/completions").iterdir():
        table = pd.read_parquet(path)
        table["completion"] = "so " * 30 + "the answer"
        table.to_parquet(path)
    assert rescore(rewards(LOW | {"init_args": {"weight": -2.0}})) == 0
    assert "  " + "so " * 30 + "the answer" in capsys.readouterr().out


def test_rewards_see_the_columns_of_the_prompts(here):
    assert rescore(rewards({"class_path": "rescored_rewards.Left"})) == 0
    frame = pd.read_parquet("run/rescored/more.parquet")
    lefts = frame["prompt"].str.split("+").str[0].astype(float)
    assert frame["score/left"].tolist() == lefts.tolist()


def test_a_reward_that_fails_now_has_no_value_and_is_counted(capsys):
    assert rescore(rewards(BROKEN | {"init_args": {"name": "low"}})) == 1
    shown, error = capsys.readouterr()
    assert error.startswith(
        "error: a reward failed on every completion: 100% of the scores of reward 'low' ended as "
        "error, for instance: RuntimeError: the sandbox is gone (rescored_rewards.py, line 14)."
    )
    assert "sandbox" not in shown
    assert cells(shown, "low")[2:] == ["–", "100.0%"]
    assert "Nothing to compare: none of the 24 completions could be scored again." in shown
    assert pd.read_parquet("run/rescored/more.parquet")["reward"].isna().all()


def test_why_no_completion_could_be_scored_is_said_before_that_there_is_nothing_to_compare(capsys):
    with redirect_stderr(sys.stdout):
        rescore(rewards(BROKEN | {"init_args": {"name": "low"}}))
    shown = capsys.readouterr().out
    assert 0 <= shown.find("the sandbox is gone") < shown.find("Nothing to compare")


@pytest.mark.parametrize(
    ("name", "exit_code", "share"), [("Buggy", 1, 100), ("BuggyOnFirst", 0, 25)]
)
def test_a_bug_is_shown_once_with_the_share_of_its_rows(name, exit_code, share, capsys):
    assert rescore(rewards({"class_path": f"rescored_rewards.{name}"})) == exit_code
    shown, error = capsys.readouterr()
    assert "KeyError" not in shown
    assert "Some rows could not be scored" not in shown
    assert error.count("has a bug") == error.count("KeyError: 'keywords'") == 1
    assert f"has a bug on {share}% of the rows. Row addition:" in error
    if exit_code:
        assert error.splitlines()[-1] == (
            "error: a reward failed on every completion: 'buggy', see above."
        )


@pytest.mark.slow
@pytest.mark.parametrize(("replies", "scored"), [(7.5, 7), (0.5, 0)])
def test_a_spent_budget_is_exit_code_4_and_rows_that_were_not_scored_have_not_changed(
    replies, scored, here, capsys
):
    """The reply to the question at the start is paid for, too."""
    for path in Path("run/completions").iterdir():  # equal completions are judged once
        table = pd.read_parquet(path)
        table["completion"] = [f"{path.name} {number}" for number in range(len(table))]
        table.to_parquet(path)
    with JudgeServer() as server:
        judge = {"model": "m", "base_url": f"{server.url}/v1", "auth": "none"}
        judge["price"] = {"prompt": PRICE.prompt, "completion": PRICE.completion}
        judge["limits"] = {"max_cost_usd": replies * REPLY_COST, "max_concurrency": 1}
        init_args = {"judge": judge, "name": "low"}
        assert rescore(rewards({"class_path": "JudgeReward", "init_args": init_args})) == 4
    shown, error = capsys.readouterr()
    frame = pd.read_parquet("run/rescored/more.parquet")
    outcomes = ["budget_spent"] * (24 - scored) + ["ok"] * scored
    assert sorted(frame["outcome/low"]) == outcomes
    assert error.startswith("error: the judge's budget is spent: 0.00")
    assert f"{scored} of 24 completions have a new reward. Raise limits.max_cost_usd" in error
    assert error.count("\n") == 1
    if scored:
        assert f"of {scored} scored completions changed. 17 could not be scored again." in shown
    else:
        assert "none of the 24 completions could be scored again" in shown


def test_a_reward_that_raises_ends_the_command_with_its_message_and_no_file(capsys):
    assert rescore(rewards(BROKEN | {"init_args": {"on_error": "raise"}})) == 2
    assert "error: reward broken failed on prompt" in capsys.readouterr().err
    assert not Path("run/rescored").exists()


COMPARES = """
from lit_grpo.rewards import Reward


class SizeOfGroup(Reward):
    def score_group(self, prompt, completions):
        return [float(len(completions))] * len(completions)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_old", [False, True], ids=["numbered", "old"])
def test_a_run_that_was_resumed_with_another_group_size_is_scored_in_its_groups(is_old, capsys):
    words = ["--trainer.max_steps=4", "--model.group_size=2", "--allow_changes"]
    assert main(["fit", "run", *words]) == 0
    Path("comparing.py").write_text(COMPARES)
    if is_old:
        for path in Path("run/completions").iterdir():
            pq.write_table(pq.read_table(path).drop_columns("group"), path)
    capsys.readouterr()
    assert rescore(rewards({"class_path": "comparing.SizeOfGroup"})) == 0
    assert f"of {3 * 2 + 2} groups" in capsys.readouterr().out
    frame = pd.read_parquet("run/rescored/more.parquet")
    sizes = frame.groupby("step")["score/size_of_group"].unique().map(list)
    assert sizes.tolist() == [[4.0], [4.0], [4.0], [2.0]]


def test_adjacent_groups_of_one_prompt_are_scored_apart(capsys):
    Path("comparing.py").write_text(COMPARES)
    path = Path("run/completions/step_000002.parquet")
    table = pd.read_parquet(path)
    assert table["group"].tolist() == [0] * 4 + [1] * 4
    for column in ("prompt_id", "prompt"):
        table[column] = table[column].iloc[0]
    table.to_parquet(path)
    assert rescore("--last=1", rewards({"class_path": "comparing.SizeOfGroup"})) == 0
    frame = pd.read_parquet("run/rescored/more.parquet")
    assert frame["score/size_of_group"].tolist() == [4.0] * 8
    assert frame["group"].tolist() == [0] * 4 + [1] * 4


def test_only_the_last_steps_are_scored_and_no_file_is_overwritten(here):
    assert rescore("--last=2") == rescore("--last", "1") == 0
    assert pd.read_parquet("run/rescored/rescored.parquet")["step"].unique().tolist() == [1, 2]
    assert pd.read_parquet("run/rescored/rescored-1.parquet")["step"].unique().tolist() == [2]


def test_rows_whose_prompt_is_gone_or_has_another_text_are_counted_and_left_out(capsys):
    path = Path("run/completions/step_000001.parquet")
    table = pq.read_table(path).to_pydict()
    table["prompt_id"][:4] = ["addition:90+90="] * 4
    table["prompt"][4:] = ["another text"] * 4
    pq.write_table(pq.read_table(path).from_pydict(table), path)
    assert rescore() == 0
    shown = capsys.readouterr().out
    assert "all 16 completions" in shown
    assert "8 rows are left out: their prompts are no longer in the data" in shown
    assert pd.read_parquet("run/rescored/rescored.parquet")["step"].unique().tolist() == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rescore"], "rescore needs the directory of a run first"),
        (["rescore", "--last=2"], "rescore needs the directory of a run first"),
        (["rescore", "nowhere"], "nowhere: no such run directory"),
        (["rescore", "run", "--last=0"], "last must be >= 1, got 0"),
        (["rescore", "run", "--data.num_digits=3"], "run: none of the prompts"),
        (["rescore", "empty"], "empty has no completions/*.parquet"),
        (["rescore", "run", "--nope=1"], "nope: no such key"),
    ],
)
def test_bad_input_is_one_line(arguments, line, capsys):
    Path("empty").mkdir()
    shutil.copy("run/config.yaml", "empty/config.yaml")
    assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {line}")


def test_a_damaged_file_is_named(capsys):
    Path("run/completions/step_000001.parquet").write_bytes(b"")
    assert rescore() == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: run/completions/step_000001.parquet cannot be read: ")


def test_a_run_without_tokens_is_refused(capsys):
    for path in Path("run/completions").iterdir():
        pq.write_table(pq.read_table(path).drop_columns("token_ids"), path)
    assert rescore() == 2
    assert "must have a column token_ids" in capsys.readouterr().err


def test_a_run_whose_directory_was_renamed_is_scored_in_place(here):
    Path("run").rename("moved")
    assert main(["rescore", "moved"]) == 0
    assert Path("moved/rescored/rescored.parquet").is_file()
    assert not Path("run").exists()
