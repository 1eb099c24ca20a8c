from pathlib import Path

import pytest
from empty_checkpoints import write_empty

from lit_grpo.cli.parsing.invocation import read_invocation
from lit_grpo.cli.run_dir import RUN_DIR_VARIABLE, choose_run_dir, next_run_dir, with_run
from lit_grpo.types import UserError


@pytest.fixture(autouse=True)
def here(here):
    (here / "base.yaml").write_text("a: 1")
    return here


def chosen(command: str, *arguments: str) -> str:
    with choose_run_dir(command, read_invocation(["--config=base.yaml", *arguments])) as run_dir:
        return run_dir


def test_a_given_directory_is_taken_as_it_is(here):
    assert chosen("fit", "--run_dir=x/y") == "x/y"
    assert not (here / "x").exists()


def test_a_training_gets_the_next_number_and_an_empty_directory_is_removed(here):
    assert chosen("fit") == "runs/base/0"
    assert not (here / "runs").exists()
    write_empty(here / "runs" / "base" / "4" / "run.log")
    assert chosen("sft") == "runs/base/5"


def test_runs_are_numbered_upwards_and_gaps_are_not_filled(tmp_path):
    assert next_run_dir(tmp_path, "sft") == tmp_path / "sft" / "0"
    (tmp_path / "sft" / "7").mkdir()
    (tmp_path / "sft" / "notes").mkdir()
    assert next_run_dir(tmp_path, "sft") == tmp_path / "sft" / "8"
    assert next_run_dir(tmp_path, "sft").is_dir()


def test_runs_that_cannot_be_made_are_named_with_the_setting(here):
    (here / "runs").touch()
    with pytest.raises(
        ValueError,
        match=r"run_dir must be .* got runs/base \(there is a file.* Set another run_dir",
    ):
        chosen("fit")


def test_a_directory_that_was_used_stays(here):
    with choose_run_dir("fit", read_invocation(["--config=base.yaml"])) as run_dir:
        write_empty(here / run_dir / "run.log")
    assert (here / run_dir / "run.log").exists()


@pytest.mark.parametrize(
    ("command", "file", "message"),
    [
        ("fit", "metrics.csv", "made in Python have none.*its script, with ckpt_path='last'"),
        ("test", "metrics.csv", r"trainer\.test\(module, data, ckpt_path='last'\)"),
        ("rescore", "metrics.csv", r"on rows of its completions: see docs/guides/reward\.md"),
        ("doctor", "metrics.csv", "needs the config: report, checkpoints and analyze do not"),
        ("fit", "notes", "not that of a run"),
    ],
)
def test_a_run_made_in_python_is_told_to_go_on_there(command, file, message):
    Path("mine").mkdir()
    Path("mine", file).touch()
    with pytest.raises(ValueError, match=message):
        with_run(command, ["mine"])


@pytest.mark.parametrize("words", [["--run_dir", "other"], ["--run_dir=other", "--seed=1"]])
def test_another_run_dir_beside_a_run_is_refused_with_how_to_begin_a_new_one(words):
    write_empty(Path("my/config.yaml"))
    with pytest.raises(
        UserError, match=r"left out .* got other\. For a new run: .*, add --ckpt_path my"
    ):
        with_run("fit", ["my", *words])
    with pytest.raises(UserError, match=r"rescore my writes there\), got other\.$"):
        with_run("rescore", ["my", *words])
    assert with_run("fit", ["my", "--run_dir=./my"])[-2:] == ["--run_dir", "my"]


def test_the_runs_within_a_directory_are_named():
    for number in range(2):
        Path(f"runs/my/{number}").mkdir(parents=True)
        Path(f"runs/my/{number}/config.yaml").touch()
    with pytest.raises(ValueError, match=r"not that of a run .* you mean runs/my/0, runs/my/1\?"):
        with_run("fit", ["runs/my"])


def test_a_checkpoint_is_told_to_be_given_with_its_run():
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/config.yaml").touch()
    last = "run/checkpoints/last.ckpt"
    Path(last).touch()
    with pytest.raises(ValueError, match=f"got its checkpoint. Use run --ckpt_path {last}"):
        with_run("fit", [last])


def test_a_config_beside_the_runs_or_in_an_outer_one_makes_no_run_a_checkpoint():
    for run in (".", "runs/my", "runs/my/checkpoints/own"):
        Path(run).mkdir(parents=True, exist_ok=True)
        Path(run, "config.yaml").touch()
    for run in ("runs/my", "runs/my/checkpoints/own"):
        assert with_run("fit", [run])[-1] == run


def test_evaluating_creates_no_directory(here):
    assert chosen("validate") == "runs/base"
    assert not (here / "runs").exists()


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_last_means_the_latest_run_that_has_a_checkpoint(command, here):
    with pytest.raises(ValueError, match="runs/base has no run with a checkpoint"):
        chosen(command, "--ckpt_path=last")
    runs = here / "runs" / "base"
    write_empty(*(runs / number / "checkpoints" / "last.ckpt" for number in ("0", "9", "10")))
    write_empty(runs / "11" / "run.log")
    assert chosen(command, "--ckpt_path=last") == "runs/base/10"
    assert chosen(command, "--ckpt_path=best") == "runs/base/10"


def test_another_rank_takes_the_directory_that_rank_0_chose(here, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(RUN_DIR_VARIABLE, "runs/base/3")
    assert chosen("fit") == chosen("fit", "--ckpt_path=last") == "runs/base/3"


def test_ranks_that_a_launcher_starts_must_be_told_their_directory(here, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv(RUN_DIR_VARIABLE)
    with pytest.raises(ValueError, match="run_dir must be set if a launcher starts the ranks"):
        chosen("fit")


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"},
        {"NODE_RANK": "1"},
    ],
    ids=["slurm", "by-hand"],
)
def test_ranks_of_other_launchers_must_be_told_their_directory_too(here, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="run_dir must be set if a launcher starts the ranks"):
        chosen("fit")


@pytest.mark.parametrize("variables", [{"SLURM_NTASKS": "1"}, {"SLURM_JOB_NAME": "bash"}])
def test_a_single_process_in_a_job_chooses_its_directory(here, monkeypatch, variables):
    for name, value in ({"SLURM_NTASKS": "4"} | variables).items():
        monkeypatch.setenv(name, value)
    assert chosen("fit") == "runs/base/0"


def test_a_run_that_ended_before_its_training_is_told_to_start_again(here):
    (here / "early").mkdir()
    (here / "early/run.log").touch()
    with pytest.raises(
        UserError, match=r"no config\.yaml\)\. It ended before its training began: sta"
    ):
        with_run("fit", ["early"])
