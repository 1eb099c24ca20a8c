from __future__ import annotations

import json
import logging
import signal
import sys
import threading

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from toy_rollouts import fit, outputs, rollouts

from lit_grpo.callbacks import WandbTeardown, ZeroRewardBreaker
from lit_grpo.runs.files.events import Event, EventsFile, read_events
from lit_grpo.runs.wandb_teardown import write_into_run

ZERO = outputs(rollouts([[0.0, 0.0]]))


class Run:
    """A wandb run whose second ``log`` fails or hangs on request."""

    def __init__(self, trouble=lambda: None):
        self.trouble = trouble
        self.num_logs = 0
        self.summary = {}
        self.finished = []

    def log(self):
        self.num_logs += 1
        if self.num_logs == 2:
            self.trouble()

    def finish(self, exit_code):
        self.finished.append(exit_code)


class LocalLogger(WandbLogger):
    """A logger of a run without a wandb service."""

    experiment = name = version = save_dir = None

    def __init__(self, run):
        self.experiment = run

    def log_metrics(self, metrics, step=None):
        self.experiment.log()

    def log_hyperparams(self, *args): ...

    def log_graph(self, *args): ...

    def save(self): ...

    def after_save_checkpoint(self, checkpoint): ...

    def finalize(self, status): ...


def train(run: Run, *callbacks, seconds: float = 60) -> WandbTeardown:
    teardown = WandbTeardown(timeout_seconds=seconds)
    trainer = fit(lambda step: ZERO, [teardown, *callbacks], steps=4, logger=LocalLogger(run))
    assert trainer.global_step
    return teardown


def test_the_run_is_finished_with_the_exit_code_of_training():
    healthy, stopped = Run(), Run()
    assert not train(healthy).hung
    train(stopped, ZeroRewardBreaker(1, 2))
    assert (healthy.num_logs, stopped.num_logs) == (4, 2)
    assert (healthy.finished, stopped.finished) == ([0], [3])
    assert healthy.summary["stop_reason"] == "done after optimizer step 4: max_steps is reached"
    assert stopped.summary["stop_reason"].startswith("No reward for 2 rollout steps")


def test_after_a_failure_training_continues_without_wandb(caplog):
    def fail():
        raise ConnectionResetError("the service died")

    run = Run(fail)
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        assert not train(run).hung
    (record,) = caplog.records
    assert "wandb failed in log_metrics (ConnectionResetError: the service" in record.getMessage()
    assert (run.num_logs, run.finished) == (2, [])


def test_a_call_that_hangs_is_abandoned_and_reported(caplog):
    forever = threading.Event()
    run = Run(forever.wait)
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        assert train(run, seconds=2).hung
    forever.set()
    (record,) = caplog.records
    assert "(TimeoutError: no answer within 2 s)" in record.getMessage()
    assert (run.num_logs, run.finished) == (2, [])


def test_without_a_wandb_logger_wandb_is_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    fit(lambda step: ZERO, [WandbTeardown()], steps=1)


class StartedLogger(WandbLogger):
    """A logger that starts its run as wandb's does, by functions for both modes."""

    name = version = None

    def __init__(self, online, offline=Run):
        self._experiment = None
        self._wandb_init = {"dir": "."}
        self._save_dir = "."
        self._starts = {None: online, "offline": offline}

    @property
    def experiment(self):
        if self._experiment is None:
            self._experiment = self._starts[self._wandb_init.get("mode")]()
        return self._experiment

    def log_metrics(self, metrics, step=None):
        self.experiment.log()

    def log_hyperparams(self, *args): ...

    def log_graph(self, *args): ...

    def save(self): ...

    def after_save_checkpoint(self, checkpoint): ...

    def finalize(self, status): ...


def refuse():
    raise RuntimeError("No API key configured.")


def train_from_start(tmp_path, logger, **settings) -> list[Event]:
    """Train with a guarded start, and return the events of the run."""
    teardown = WandbTeardown(**settings)
    teardown.guard_start(logger, tmp_path)
    trainer = fit(lambda step: ZERO, [teardown, EventsFile(tmp_path)], steps=4, logger=logger)
    assert trainer.global_step == 4
    return read_events(tmp_path)


def test_a_start_that_succeeds_is_used_once_and_without_a_word(tmp_path, caplog):
    run = Run()
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        events = train_from_start(tmp_path, StartedLogger(iter([run]).__next__))
    assert caplog.records == []
    assert [one.kind for one in events] == ["start", "done"]
    assert (run.num_logs, run.finished) == (4, [0])


def test_without_a_login_the_run_goes_on_and_wandb_logs_offline(tmp_path, caplog):
    offline = Run()
    logger = StartedLogger(refuse, lambda: offline)
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        _, warning, _ = train_from_start(tmp_path, logger)
    assert (offline.num_logs, offline.finished) == (4, [0])
    (record,) = caplog.records
    assert "wandb could not start (RuntimeError: No API key configured.)" in record.getMessage()
    assert f"lit-grpo wandb-sync {tmp_path}`" in record.getMessage()
    assert (warning.kind, warning.message) == ("warning", record.getMessage())


def test_a_start_that_hangs_is_given_up_and_cannot_come_back(tmp_path, caplog):
    late, offline, forever = Run(), Run(), threading.Event()
    is_over = threading.Event()

    def hang():
        forever.wait()
        is_over.set()
        return late

    logger = StartedLogger(hang, lambda: offline)
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        train_from_start(tmp_path, logger, start_timeout_seconds=0.3)
    forever.set()
    assert is_over.wait(60)
    assert logger.experiment is offline
    assert (late.num_logs, offline.num_logs) == (0, 4)
    assert "(TimeoutError: no answer within 0.3 s)" in caplog.records[0].getMessage()


def test_a_wandb_that_cannot_start_at_all_is_left_out(tmp_path, caplog):
    logger = StartedLogger(refuse, refuse)
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        train_from_start(tmp_path, logger)
    (record,) = caplog.records
    assert "nor offline (RuntimeError: No API key configured.)" in record.getMessage()
    logger.experiment.log({"x": 1})  # of a user's callback


def test_a_logger_without_a_directory_writes_into_the_run():
    here, elsewhere = (WandbLogger(project="test", **one) for one in ({}, {"save_dir": "x"}))
    for logger in (here, elsewhere):
        write_into_run(logger, "runs/my/0")
    assert (here.save_dir, here._wandb_init["dir"]) == ("runs/my/0", "runs/my/0")
    assert (elsewhere.save_dir, elsewhere._wandb_init["dir"]) == ("x", "x")


REAL_RUN = """
import os, signal, sys, time
import psutil
import wandb
from lightning.pytorch.loggers import WandbLogger
from toy_rollouts import fit, outputs, rollouts
from lit_grpo.callbacks import Checkpoints, WandbTeardown

directory, signum = sys.argv[1], int(sys.argv[2])
services = []

def has_acted(pid):  # on the signal
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return True

def step(number):
    if number == 1 and signum:
        for child in psutil.Process().children(recursive=True):
            services.append(child.pid)
            os.kill(child.pid, signum)
        while not all(map(has_acted, services)):
            time.sleep(0.01)
    return outputs(rollouts([[0.0, 1.0]]))

logger = WandbLogger(project="test", save_dir=directory, offline=True)
teardown = WandbTeardown(timeout_seconds=5 if signum == signal.SIGSTOP else 120)
trainer = fit(step, [teardown, Checkpoints(dirpath=str(directory))], steps=4, logger=logger)
is_open = wandb.run is not None
print("steps", trainer.global_step, "hung", teardown.hung, "open", is_open, flush=True)
if teardown.hung:
    for pid in services:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)
"""


def run_script(importer, tmp_path, script: str, *words: str) -> str:
    """Run it to its end; return what it said."""
    (tmp_path / "run.py").write_text(script)
    quiet = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    words = ("1", "run.py", str(tmp_path), *words)
    importer.run(words, tmp_path, program="forked_program", **quiet)
    return (tmp_path / "said.txt").read_text()


def run_with_service(importer, tmp_path, signum: int) -> str:
    """Train with a real wandb service that gets a signal in the second step, if any."""
    said = run_script(importer, tmp_path, REAL_RUN, str(int(signum)))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4
    return said


@pytest.mark.slow
def test_a_real_wandb_run_is_finished_after_training(tmp_path, importer):
    said = run_with_service(importer, tmp_path, 0)
    assert "steps 4 hung False open False\n" in said
    assert "wandb failed" not in said
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_a_run_survives_the_death_of_the_wandb_service(tmp_path, importer):
    said = run_with_service(importer, tmp_path, signal.SIGKILL)
    assert "steps 4 hung False" in said
    assert said.count("wandb failed in log_metrics (ConnectionResetError") == 1


@pytest.mark.slow
def test_a_run_survives_a_wandb_service_that_hangs(tmp_path, importer):
    said = run_with_service(importer, tmp_path, signal.SIGSTOP)
    assert "steps 4 hung True" in said
    assert said.count("wandb failed in finish (TimeoutError: no answer within 5 s)") == 1


ENDINGS = """
import json, sys
from pathlib import Path
import wandb
from lightning.pytorch import Callback
from lightning.pytorch.loggers import WandbLogger
from toy_rollouts import fit, outputs, rollouts
from wandb_log import describe_end
from lit_grpo.callbacks import WandbTeardown, ZeroRewardBreaker
from lit_grpo.stopping import exit_code_of_signal, stop_run
from lit_grpo.types import StopReason, UserError

class Stop(Callback):
    def on_train_batch_end(self, trainer, *args):
        reason = StopReason(exit_code=exit_code_of_signal(15), message="Ended by SIGTERM. " * 99)
        stop_run(trainer, reason)

def run(ending, directory):
    def step(number):
        if ending == "bug":
            raise ZeroDivisionError("a bug\\nof two lines")
        if ending == "mistake":
            raise UserError("wrong data")
        return outputs(rollouts([[0.0, 0.0]]))

    directory.mkdir()
    others = {"no reward": [ZeroRewardBreaker(1, 2)], "signal": [Stop()]}.get(ending, [])
    logger = WandbLogger(project="test", save_dir=str(directory), offline=True)
    try:
        fit(step, [WandbTeardown(timeout_seconds=120), *others], steps=3, logger=logger)
    except (ZeroDivisionError, UserError):
        pass

places = {ending: Path(sys.argv[1]) / ending for ending in sys.argv[2:]}
for ending, directory in places.items():
    run(ending, directory)
wandb.teardown()  # so that its service has written everything
print(json.dumps({ending: json.loads(describe_end(where)) for ending, where in places.items()}))
"""
ENDS = {
    "done": (0, "done after optimizer step 3: max_steps is reached"),
    "no reward": (3, "No reward for 2 rollout steps"),
    "signal": (143, "Ended by SIGTERM. Ended by SIGTERM. "),
    "bug": (1, "ZeroDivisionError: a bug of two lines"),
    "mistake": (2, "UserError: wrong data"),
}


@pytest.mark.slow
def test_wandb_learns_how_the_run_ended(tmp_path, importer):
    said = run_script(importer, tmp_path, ENDINGS, *ENDS)
    (found,) = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    for ending, (exit_code, reason) in ENDS.items():
        assert found[ending]["exit_codes"] == [exit_code], ending
        assert found[ending]["stop_reason"].startswith(reason), ending
        assert len(found[ending]["stop_reason"]) <= 200
