"""Runs that a signal ends, in this process and in real ones."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from forked import FORK
from forked_ranks import Forked, Importer
from lightning.pytorch.callbacks import Callback
from toy_rollouts import fit, outputs, rollouts
from worker_processes import wait_until

from lit_grpo.callbacks import Checkpoints
from lit_grpo.runs.shutdown.early_signals import exit_on_signal
from lit_grpo.runs.shutdown.signals import LAUNCHERS, SIGNALS, StopOnSignal
from lit_grpo.stopping import get_stop_reason, stop_run
from lit_grpo.types import StopReason

pytestmark = pytest.mark.usefixtures("without_nohup")

STEP = outputs(rollouts([[0.0, 1.0]]))

RUN = """
import sys, time
from pathlib import Path
from toy_rollouts import fit, outputs, rollouts
from lit_grpo.callbacks import Checkpoints
from lit_grpo.runs.shutdown.signals import StopOnSignal
from lit_grpo.stopping import get_stop_reason

run_dir = Path(sys.argv[1])

def step(number):
    if number:
        (run_dir / "started").touch()
        while not (run_dir / "go").exists():
            time.sleep(0.02)
    return outputs(rollouts([[0.0, 1.0]]))

callbacks = [StopOnSignal(), Checkpoints(dirpath=str(run_dir / "checkpoints"))]
trainer = fit(step, callbacks, steps=4, **OPTIONS)
reason = get_stop_reason(trainer)
sys.stdout.write(f"steps {trainer.global_step} {reason.message if reason else 'done'}\\n")
sys.exit(reason.exit_code if reason else 0)
"""


@contextmanager
def in_second_step(
    importer: Importer, run_dir: Path, *, num_ranks: int = 1, options: str = "{}"
) -> Iterator[Forked]:
    """Start a run in a process and wait until it is in its second step."""
    script = run_dir / "run.py"
    script.write_text(RUN.replace("OPTIONS", options))
    words = [str(num_ranks), str(script), str(run_dir)]
    with importer.running(words, run_dir, program="forked_program") as started:
        (process,) = started.processes
        wait_until(lambda: process.poll() is not None or (run_dir / "started").exists(), 200)
        assert process.poll() is None, said(run_dir)
        yield process


def said(run_dir: Path) -> str:
    return (run_dir / "said.txt").read_text()


def saved(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, signum, capfd):
    def step(number):
        if number == 1:
            os.kill(os.getpid(), signum)
        return STEP

    trainer = fit(
        step, [StopOnSignal(), Checkpoints(dirpath=str(tmp_path / "checkpoints"))], steps=4
    )
    reason = get_stop_reason(trainer)
    assert reason.exit_code == 128 + signum
    assert f"Ended by {signum.name} after 2 rollout steps." in reason.message
    assert f"{signum.name}: ending with a checkpoint" in capfd.readouterr().err
    assert saved(tmp_path)["global_step"] == trainer.global_step == 2
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [
        "last.ckpt",
        "step_000001.ckpt",
        "step_000001.ckpt.json",
        "step_000002.ckpt",
        "step_000002.ckpt.json",
    ]


def test_a_closed_terminal_may_send_its_signal_again_later(tmp_path):
    def step(number):
        if number == 1:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGHUP)
        return STEP

    reason = get_stop_reason(fit(step, [StopOnSignal()], steps=4))
    assert reason.message.startswith("Ended by SIGHUP after 2 rollout steps")


def test_under_nohup_a_run_outlives_its_terminal():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def step(number):
        os.kill(os.getpid(), signal.SIGHUP)
        return STEP

    trainer = fit(step, [StopOnSignal()], steps=2)
    assert get_stop_reason(trainer) is None
    with exit_on_signal(trainer):
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def end_by_a_signal_after_the_reader_of_the_output() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, 2)

    def step(number):
        if number == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return STEP

    reason = get_stop_reason(fit(step, [StopOnSignal()], steps=4))
    os._exit(0 if reason.message.startswith("Ended by SIGINT after 2 rollout steps") else 1)


def test_ctrl_c_may_end_what_reads_the_output_sooner():
    """As in ``lit-grpo fit 2>&1 | tee log``."""
    process = FORK.Process(target=end_by_a_signal_after_the_reader_of_the_output)
    process.start()
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("launcher", "soon", "later"),
    [(None, 0.05, 0.4), ("TORCHELASTIC_RUN_ID", 0.4, 0.6), ("SLURM_JOB_ID", 0.4, 0.6)],
)
def test_a_second_signal_soon_is_the_same_request_and_a_later_one_ends_the_process(
    launcher, soon, later, monkeypatch
):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    if launcher is not None:
        monkeypatch.setenv(launcher, "1")
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append((pid, signum)))
    monkeypatch.setattr(signal, "signal", lambda signum, handler: sent.append((signum, handler)))
    now = iter([10.0, 10.0 + soon, 10.0 + later])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    callback = StopOnSignal()
    callback._receive(signal.SIGTERM, None)
    callback._receive(signal.SIGINT, None)
    assert (callback.received, sent) == (signal.SIGTERM, [])
    callback._receive(signal.SIGTERM, None)
    assert sent == [(signal.SIGTERM, signal.SIG_DFL), (os.getpid(), signal.SIGTERM)]


def test_a_second_ctrl_c_in_a_notebook_raises_and_leaves_the_process(monkeypatch, capfd):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    now = iter([10.0, 11.0, 12.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    callback = StopOnSignal()
    callback._receive(signal.SIGINT, None)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            callback._receive(signal.SIGINT, None)
    said = capfd.readouterr().err
    assert "Send it again to end the run without one." in said
    assert "SIGINT again: ending the run now." in said


@pytest.mark.slow
def test_a_second_signal_ends_a_real_process_at_once_without_a_checkpoint(tmp_path, importer):
    with in_second_step(importer, tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "ending with a checkpoint" in said(tmp_path))
        assert process.poll() is None

        def has_ended() -> bool:
            process.send_signal(signal.SIGTERM)  # within half a second it is the same request
            return process.poll() is not None

        wait_until(has_ended)
        assert process.wait(200) == -signal.SIGTERM
    assert not list(tmp_path.glob("checkpoints/step_000002*"))


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_ranks(tmp_path, importer):
    options = "{'strategy': 'ddp', 'devices': 2}"
    with in_second_step(importer, tmp_path, num_ranks=2, options=options) as process:
        (rank_1,) = children_of(process.pid)
        os.kill(rank_1, signal.SIGTERM)
        (tmp_path / "go").touch()
        assert process.wait(200) == 128 + signal.SIGTERM
    assert said(tmp_path).count("steps 2 Ended by SIGTERM after 2 rollout steps.") == 2
    assert saved(tmp_path)["global_step"] == 2


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("launcher", "more"),
    [(None, ""), ("TORCHELASTIC_RUN_ID", " The launcher of rank 0 has died.")],
)
def test_only_a_launcher_that_has_died_explains_a_signal_and_not_a_shell(
    monkeypatch, launcher, more
):
    """The parent of a run is another one once the shell that started it has ended."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    if launcher is not None:
        monkeypatch.setenv(launcher, "1")

    def step(number):
        monkeypatch.setattr(os, "getppid", lambda: 1)
        os.kill(os.getpid(), signal.SIGTERM)
        return STEP

    reason = get_stop_reason(fit(step, [StopOnSignal()], steps=3))
    assert reason.message == f"Ended by SIGTERM after 1 rollout step.{more}"


def test_a_signal_does_not_replace_an_earlier_reason_to_stop(tmp_path):
    reason = StopReason(exit_code=7, message="first")

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *args):
            stop_run(trainer, reason)
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = fit(lambda step: STEP, [Stop(), StopOnSignal()], steps=3)
    assert trainer.global_step == 1
    assert get_stop_reason(trainer) == reason


def test_the_handlers_are_there_until_the_end_and_then_those_of_before(tmp_path):
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]
    during = []

    class Look(Callback):
        def on_save_checkpoint(self, *args):
            during.append(signal.getsignal(signal.SIGINT))

    callbacks = [StopOnSignal(), Checkpoints(dirpath=str(tmp_path)), Look()]
    fit(lambda step: STEP, callbacks, steps=2)
    assert during
    assert not set(during) & set(before)
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_crash_restores_the_handlers():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError):
        fit(lambda step: 1 // 0, [StopOnSignal()], steps=2)
    assert signal.getsignal(signal.SIGINT) is before
