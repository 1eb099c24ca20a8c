"""Signals while no training runs: the process exits at once."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from forked import FORK
from worker_processes import wait_until

from lit_grpo.runs.shutdown import early_signals
from lit_grpo.runs.shutdown.early_signals import exit_on_signal
from lit_grpo.runs.shutdown.signals import SIGNALS

pytestmark = pytest.mark.usefixtures("without_nohup")


class NoLauncher:
    strategy = type("Strategy", (), {"launcher": None})


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_before_the_training_leaves_at_once_and_says_so(signum, capfd):
    before = [signal.getsignal(one) for one in SIGNALS]

    def load():
        with exit_on_signal(NoLauncher()):
            os.kill(os.getpid(), signum)
            time.sleep(60)

    with pytest.raises(SystemExit) as leave:
        load()
    assert leave.value.code == 128 + signum
    wait_until(lambda: f"{signum.name}: ending now, without" in capfd.readouterr().err)
    assert signal.set_wakeup_fd(-1) == -1
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_ctrl_c_before_or_after_the_training_leaves_a_notebook_open(monkeypatch, caplog, capfd):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    caplog.set_level(logging.INFO)

    def load():
        with exit_on_signal(NoLauncher()):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        load()
    wait_until(lambda: "SIGINT: ending now, without" in capfd.readouterr().err)
    assert "Ended by SIGINT, without a new checkpoint." in caplog.messages
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_to_a_forked_process_is_not_one_to_the_run(capfd):
    with exit_on_signal(NoLauncher()):
        child = FORK.Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(60)
        time.sleep(0.3)
    assert child.exitcode == -signal.SIGTERM
    assert "ending now" not in capfd.readouterr().err


def sleep_while_another_thread_receives_a_signal() -> None:
    early_signals.WAKE_SECONDS = 0.2
    receiver = threading.Thread(
        target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    )
    try:
        with exit_on_signal(NoLauncher()):
            threading.Timer(0.2, receiver.start).start()
            time.sleep(600)
    except SystemExit as leave:
        os._exit(leave.code - 100)


def test_a_call_goes_on_after_a_signal_to_another_thread_and_is_ended(capfd):
    sleeping = FORK.Process(target=sleep_while_another_thread_receives_a_signal)
    sleeping.start()
    sleeping.join(120)
    assert sleeping.exitcode == 128 + signal.SIGTERM - 100
    assert "SIGTERM: ending now" in capfd.readouterr().err


def swallow_what_a_handler_raises(log_file: Path) -> None:
    early_signals.WAKE_SECONDS = early_signals.EXIT_SECONDS = 0.2
    logging.getLogger("lit_grpo").addHandler(logging.FileHandler(log_file))
    with exit_on_signal(NoLauncher()):
        pid = os.getpid()
        while True:  # as a library might
            try:
                if pid:
                    pid = os.kill(pid, signal.SIGTERM)
                time.sleep(1)
            except BaseException:
                pid = None


def test_a_process_that_does_not_leave_at_a_signal_is_ended(capfd, tmp_path):
    log_file = tmp_path / "run.log"
    stuck = FORK.Process(target=swallow_what_a_handler_raises, args=[log_file])
    stuck.start()
    stuck.join(120)
    assert stuck.exitcode == 128 + signal.SIGTERM
    assert "SIGTERM: ending now" in capfd.readouterr().err
    assert log_file.read_text().startswith("Ended by SIGTERM: its main thread is stuck")


LOADING = """
import sys, time
from pathlib import Path
from lightning.pytorch.callbacks import Callback
from small_runs import make_module
from lit_grpo import AdditionData, Trainer

class Hold(Callback):
    def hold(self, *args, **kwargs):
        Path("held").touch()
        time.sleep(600)

setattr(Hold, sys.argv[1], Hold.hold)
data = AdditionData(1, train_size=8, validation_size=8, prompts_per_step=2)
settings = {"accelerator": "cpu", "num_sanity_val_steps": 1, "limit_val_batches": 1}
Trainer("run", max_steps=2, callbacks=[Hold()], **settings).fit(make_module(), data)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "signum"),
    [
        ("setup", signal.SIGTERM),
        ("setup", signal.SIGINT),
        ("on_sanity_check_start", signal.SIGTERM),
        ("on_sanity_check_start", signal.SIGUSR1),
        ("on_fit_start", signal.SIGUSR1),
    ],
)
def test_a_run_that_loads_or_checks_its_validation_leaves_at_a_signal(
    hook, signum, tmp_path, importer
):
    (tmp_path / "load.py").write_text(LOADING)
    said = (tmp_path / "said.txt").read_text
    with importer.running(["1", "load.py", hook], tmp_path, program="forked_program") as started:
        (process,) = started.processes
        wait_until((tmp_path / "held").exists, 120)
        process.send_signal(signum)
        assert process.wait(60) == 128 + signum, said()
    assert f"{signum.name}: ending now, without a new checkpoint." in said()
    assert "Traceback" not in said()
    assert f"Ended by {signum.name}" in (tmp_path / "run/run.log").read_text()
    assert not (tmp_path / "run/events.jsonl").exists()
