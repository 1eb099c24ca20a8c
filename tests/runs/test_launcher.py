"""A rank that ends: how the run's exit code follows, and what real processes say."""

import json
import logging
import os
import signal
import sys
import threading
import time

import pytest
from engine_runs import command, running
from paths import SUPPORT
from python_runs import train
from small_runs import make_module
from tiny import LLAMA
from worker_processes import has_ended, wait_until

from lit_grpo import AdditionData, Trainer, UserError
from lit_grpo.runs import launcher
from lit_grpo.runs.files.event_log import read_events
from lit_grpo.runs.launcher import how_it_ended
from lit_grpo.stopping import ExitCode

TWO_RANKS = {
    "trainer": {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp",
        "max_steps": 3,
        "enable_progress_bar": False,
    },
    "model": {
        "policy": {"architecture": LLAMA},
        "rewards": [{"class_path": "small_runs.ShareOfLowBytes"}],
        "group_size": 2,
        "sampling": {"max_tokens": 3},
    },
    "data": {
        "class_path": "AdditionData",
        "init_args": {"prompts_per_step": 2, "train_size": 8, "validation_size": 0},
    },
}


def fit_of(directory, settings) -> list[str]:
    """Return the command that trains with these settings, from a file in the directory."""
    (directory / "run.json").write_text(json.dumps(settings))
    return command("fit", "run.json", {})


def forked_ranks(importer, directory, settings, *, num_ranks=2):
    """Return a context with the run, whose rank 0 starts the others."""
    words = [str(num_ranks), *fit_of(directory, settings)[3:]]
    return importer.running(words, directory, program="forked_program")


@pytest.mark.parametrize(
    ("returncode", "code", "words"),
    [
        (1, ExitCode.CRASHED, "ended with exit code 1 (crashed)"),
        (77, ExitCode.RANK_LOST, "ended with exit code 77 (exit_code_77)"),
        (8, ExitCode.STALLED, "ended with exit code 8 (stalled)"),
        (5, ExitCode.ENGINE_FAILED, "ended with exit code 5 (engine_outage)"),
        (-9, ExitCode.RANK_LOST, "was killed by SIGKILL (is the machine out of memory?)"),
        (-11, ExitCode.RANK_LOST, "was killed by SIGSEGV"),
        (-15, 143, "was ended by SIGTERM"),
        (143, 143, "was ended by SIGTERM"),
        (130, 130, "was ended by SIGINT"),
    ],
)
def test_the_exit_code_of_a_run_follows_from_that_of_its_rank(returncode, code, words):
    assert how_it_ended(returncode) == (code, words)


def test_a_rank_prints_its_error_if_rank_0_goes_on(monkeypatch):
    monkeypatch.setattr(launcher, "SAME_ERROR_SECONDS", 0.1)
    assert not launcher.ends_with_rank_0()  # it was not started by a rank
    monkeypatch.setenv(launcher.PARENT_VARIABLE, str(os.getppid()))
    assert not launcher.ends_with_rank_0()


def test_a_rank_leaves_its_error_to_rank_0_if_that_ends_as_well():
    (reads, writes), (sees_start, starts) = os.pipe(), os.pipe()
    if not (rank_0 := os.fork()):
        os.environ[launcher.PARENT_VARIABLE] = str(os.getpid())
        if not os.fork():
            os.write(starts, b"!")
            os.write(writes, b"yes" if launcher.ends_with_rank_0() else b"no")
        else:
            os.read(sees_start, 1)
            time.sleep(0.3)
        os._exit(0)
    os.waitpid(rank_0, 0)
    assert os.read(reads, 3) == b"yes"


def test_a_rank_whose_rank_0_ends_before_they_form_a_group_ends_as_well():
    reads, writes = os.pipe()
    if not (rank_0 := os.fork()):
        parent = os.getpid()
        if not os.fork():
            os.dup2(writes, 2)
            logging.basicConfig(force=True, stream=open(2, "w"))  # noqa: SIM115
            launcher.end_without_parent(parent, threading.Event())
        os._exit(0)
    os.waitpid(rank_0, 0)
    os.close(writes)
    with open(reads) as said:  # until the rank has ended
        assert f"(process {rank_0}) has ended before the training" in said.read()


def test_processes_that_cannot_share_a_step_are_refused_before_one_is_started(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(launcher.subprocess, "Popen", None)
    data = AdditionData(1, train_size=12, validation_size=0, prompts_per_step=8)
    trainer = Trainer(tmp_path, devices=3, strategy="ddp", accelerator="cpu", max_steps=1)
    with pytest.raises(UserError, match="prompts_per_step must be a positive multiple of 3"):
        trainer.fit(make_module(), data)


@pytest.mark.parametrize("name", ["-", "-c"])
def test_a_program_without_a_file_cannot_be_started_for_each_device(name, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher.subprocess, "Popen", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [name])
    data = AdditionData(1, train_size=12, validation_size=0, prompts_per_step=8)
    trainer = Trainer(tmp_path, devices=2, strategy="ddp", accelerator="cpu", max_steps=1)
    with pytest.raises(UserError, match=rf"got one without \(python {name}\)\. Save it in a file"):
        trainer.fit(make_module(), data)


def test_a_rank_of_another_training_does_not_train_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv(launcher.PARENT_VARIABLE, str(os.getppid()))
    with pytest.raises(UserError, match="the same number of devices for all trainings") as error:
        train(tmp_path / "run")
    assert str(tmp_path / "run") in str(error.value)
    with pytest.raises(UserError, match="the same number of devices for all trainings"):
        train(tmp_path / "run", ckpt_path="auto")  # which is not done
    monkeypatch.delenv(launcher.PARENT_VARIABLE)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="the same number of devices for all trainings"):
        train(tmp_path / "run")


def test_a_rank_of_another_training_leaves_out_one_that_is_done(tmp_path, monkeypatch):
    train(tmp_path / "run")
    events = read_events(tmp_path / "run")
    monkeypatch.setenv(launcher.PARENT_VARIABLE, str(os.getppid()))
    trainer, _ = train(tmp_path / "run", ckpt_path="auto")
    assert trainer.global_step == 0
    assert read_events(tmp_path / "run") == events


def test_a_rank_is_not_ended_once_it_fails_or_trains():
    is_over = threading.Event()
    is_over.set()
    launcher.end_without_parent(2**22 + 1, is_over)  # no process has such a number


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_rank_stays_behind_when_rank_0_is_killed_while_they_start(tmp_path, importer):
    settings = TWO_RANKS | {"trainer": TWO_RANKS["trainer"] | {"callbacks": ["holds.LoseRank0"]}}
    with forked_ranks(importer, tmp_path, settings) as ranks:
        (exit_code,) = ranks.wait(200)
        (rank_0,) = ranks.pids
        said = tmp_path / "said.txt"
        wait_until(lambda: f"(process {rank_0}) has ended before" in said.read_text())
    assert exit_code == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_error_of_all_ranks_is_printed_once(tmp_path, importer):
    settings = {
        "trainer": {"accelerator": "cpu", "devices": 3, "strategy": "ddp", "max_steps": 1},
        "model": {"policy": {"architecture": LLAMA}, "rewards": ["MathReward"]},
        "data": {
            "class_path": "PromptData",
            "init_args": {"train": "nowhere.jsonl", "prompts_per_step": 3},
        },
    }
    with forked_ranks(importer, tmp_path, settings, num_ranks=3) as started:
        assert started.processes[0].wait(200) == ExitCode.WRONG_INPUT
        wait_until(lambda: has_ended(started.pids[0]))  # the other ranks end after rank 0
    assert (tmp_path / "said.txt").read_text().count("error: nowhere.jsonl: no such file") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bug_on_another_rank_is_a_crash_and_not_a_lost_machine(tmp_path, importer):
    settings = TWO_RANKS | {"trainer": TWO_RANKS["trainer"] | {"callbacks": ["holds.CrashRank"]}}
    with forked_ranks(importer, tmp_path, settings) as ranks:
        (exit_code,) = ranks.wait(200)
    said = (tmp_path / "said.txt").read_text()
    assert exit_code == ExitCode.CRASHED, said
    assert "KeyError: 'a bug of rank 1'" in said
    assert "error: rank 1 has crashed, and the run with it" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGKILL, ExitCode.RANK_LOST), (signal.SIGTERM, 143)]
)
def test_a_rank_that_ends_before_the_training_ends_the_run_with_a_message(
    signum, code, tmp_path, importer
):
    """The ranks are new interpreters in one of the cases, and forked in the other."""
    lost = {"class_path": "holds.LoseRank", "init_args": {"signum": int(signum)}}
    settings = TWO_RANKS | {"trainer": TWO_RANKS["trainer"] | {"callbacks": [lost]}}
    if signum == signal.SIGKILL:
        words = fit_of(tmp_path, settings)
        with running(words, tmp_path, PYTHONPATH=str(SUPPORT)) as process:
            exit_code = process.wait(200)
    else:
        with forked_ranks(importer, tmp_path, settings) as ranks:
            (exit_code,) = ranks.wait(200)
    said = (tmp_path / "said.txt").read_text()
    assert exit_code == code, said
    name = signal.Signals(signum).name
    assert f"by {name}" in (tmp_path / "run" / "run.log").read_text(), said
    assert "Rank 1 (process " in said
