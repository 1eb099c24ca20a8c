from __future__ import annotations

import csv
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from paths import SUPPORT
from processes import running
from toy_rollouts import fit, outputs, rollouts
from worker_processes import wait_until

from lit_grpo.callbacks import ExitCheckpoint, ZeroRewardBreaker
from lit_grpo.runs.files import MetricsFile
from lit_grpo.stopping import get_stop_reason, stop_run
from lit_grpo.types import StopReason

STEP = outputs(rollouts([[0.0, 1.0]]))

RUN = """
import sys, time
from pathlib import Path
from toy_rollouts import fit, outputs, rollouts
from lit_grpo.callbacks import ExitCheckpoint
from lit_grpo.stopping import get_stop_reason

run_dir = Path(sys.argv[1])

def step(number):
    if number:
        (run_dir / "started").touch()
        while not (run_dir / "go").exists():
            time.sleep(0.02)
    return outputs(rollouts([[0.0, 1.0]]))

trainer = fit(step, [ExitCheckpoint(run_dir / "checkpoints")], steps=4, **OPTIONS)
reason = get_stop_reason(trainer)
sys.stdout.write(f"steps {trainer.global_step} {reason.message if reason else 'done'}\\n")
sys.exit(reason.exit_code if reason else 0)
"""


@contextmanager
def in_second_step(run_dir: Path, options: str = "{}") -> Iterator[Popen[str]]:
    """Start a run in a process and wait until it is in its second step."""
    script = run_dir / "run.py"
    script.write_text(RUN.replace("OPTIONS", options))
    words = [sys.executable, str(script), str(run_dir)]
    with running(words, said=run_dir / "said.txt", PYTHONPATH=str(SUPPORT)) as process:
        wait_until(lambda: process.poll() is not None or (run_dir / "started").exists(), 200)
        assert process.poll() is None, said(run_dir)
        yield process


def said(run_dir: Path) -> str:
    return (run_dir / "said.txt").read_text()


def saved(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path, signum, capfd):
    def step(number):
        if number == 1:
            os.kill(os.getpid(), signum)
        return STEP

    trainer = fit(step, [ExitCheckpoint(tmp_path / "checkpoints")], steps=4)
    reason = get_stop_reason(trainer)
    assert reason.exit_code == 128 + signum
    assert f"Ended by {signum.name} after 2 rollout steps." in reason.message
    assert f"{signum.name}: ending after this rollout step" in capfd.readouterr().err
    assert saved(tmp_path)["global_step"] == trainer.global_step == 2
    assert os.listdir(tmp_path / "checkpoints") == ["last.ckpt"]


def test_a_second_signal_soon_is_the_same_request_and_a_later_one_ends_the_process(
    tmp_path, monkeypatch
):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append((pid, signum)))
    monkeypatch.setattr(signal, "signal", lambda signum, handler: sent.append((signum, handler)))
    now = iter([10.0, 10.4, 10.6])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    callback = ExitCheckpoint(tmp_path)
    callback._receive(signal.SIGTERM, None)
    callback._receive(signal.SIGINT, None)
    assert (callback.received, sent) == (signal.SIGTERM, [])
    callback._receive(signal.SIGTERM, None)
    assert sent == [(signal.SIGTERM, signal.SIG_DFL), (os.getpid(), signal.SIGTERM)]


@pytest.mark.slow
def test_a_second_signal_ends_a_real_process_at_once_without_a_checkpoint(tmp_path):
    with in_second_step(tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "ending after this rollout step" in said(tmp_path))
        time.sleep(1.2)  # what comes within half a second is the same request
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.wait(200)
    assert process.returncode == -signal.SIGTERM
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_ranks(tmp_path):
    with in_second_step(tmp_path, "{'strategy': 'ddp', 'devices': 2}") as process:
        (rank_1,) = children_of(process.pid)
        os.kill(rank_1, signal.SIGTERM)
        (tmp_path / "go").touch()
        process.wait(200)
    assert process.returncode == 128 + signal.SIGTERM
    assert said(tmp_path).count("steps 2 Ended by SIGTERM after 2 rollout steps.") == 2
    assert saved(tmp_path)["global_step"] == 2


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_finished_run_has_a_last_checkpoint_and_restores_the_handlers(tmp_path):
    before = [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)]
    inside = []

    class Look(Callback):
        def on_train_batch_end(self, *args):
            inside.append(signal.getsignal(signal.SIGINT))

    fit(lambda step: STEP, [ExitCheckpoint(tmp_path), Look()], steps=2)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
    assert inside[0] not in before
    assert [signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_crash_restores_the_handlers_and_keeps_the_earlier_checkpoint(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    fit(lambda step: STEP, [ExitCheckpoint(tmp_path)], steps=2)
    with pytest.raises(ZeroDivisionError):
        fit(lambda step: 1 // 0, [ExitCheckpoint(tmp_path)], steps=2)
    assert signal.getsignal(signal.SIGINT) is before
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path):
    fit(lambda step: STEP, [ExitCheckpoint(tmp_path)], steps=1)

    class Unsavable(Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["no"] = (n for n in ())

    with pytest.raises(TypeError, match="pickle"):
        fit(lambda step: STEP, [Unsavable(), ExitCheckpoint(tmp_path)], steps=2)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 1


def test_a_stop_by_another_callback_is_saved_and_keeps_its_reason(tmp_path):
    zero = outputs(rollouts([[0.0, 0.0]]))
    breaker = ZeroRewardBreaker(alert_after=1, stop_after=2)
    trainer = fit(lambda step: zero, [breaker, ExitCheckpoint(tmp_path)], steps=9)
    assert get_stop_reason(trainer).exit_code == 3
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert state["global_step"] == 2
    assert state["callbacks"]["ZeroRewardBreaker"]["streak"] == 2


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.should_stop = True


# Epochs have three steps, and every second step is followed by a validation: stops come in the
# middle of an epoch and at its end, with and without a validation.
@pytest.mark.parametrize("stop_at", [1, 2, 3, 4])
@pytest.mark.parametrize("limits", [{"steps": 8}, {"steps": -1, "max_epochs": 3}])
def test_a_resumed_run_continues_exactly_where_it_was_stopped(tmp_path, stop_at, limits):
    def run(directory, *callbacks, **options):
        torch.manual_seed(0)
        return fit(
            lambda step: STEP,
            [*callbacks, ExitCheckpoint(directory)],
            validate_every=2,
            num_batches=3,
            logger=MetricsFile(directory),
            **limits,
            **options,
        )

    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", StopAt(stop_at))
    resumed = run(tmp_path / "cut", ckpt_path=tmp_path / "cut" / "last.ckpt")
    assert torch.equal(resumed.model.linear.weight, whole.model.linear.weight)
    assert resumed.global_step == whole.global_step
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def losses(directory):
    with (directory / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(row["step"], row["epoch"], row["policy/loss"]) for row in rows]


def test_a_finished_run_can_be_made_longer(tmp_path):
    torch.manual_seed(0)
    whole = fit(lambda step: STEP, [], steps=5, num_batches=3)
    torch.manual_seed(0)
    fit(lambda step: STEP, [ExitCheckpoint(tmp_path)], steps=2, num_batches=3)
    last = tmp_path / "last.ckpt"
    longer = fit(lambda step: STEP, [], steps=5, num_batches=3, ckpt_path=last)
    assert torch.equal(longer.model.linear.weight, whole.model.linear.weight)


def test_model_checkpoint_shares_last_ckpt_also_when_the_exit_wrote_it_first(tmp_path):
    def run(steps, **options):
        checkpoint = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=4)
        fit(
            lambda step: STEP,
            [checkpoint, ExitCheckpoint(tmp_path)],
            steps=steps,
            enable_checkpointing=True,
            **options,
        )

    run(2)
    run(5, ckpt_path=tmp_path / "last.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 5


def test_a_link_of_that_name_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "best.ckpt").write_text("best")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    fit(lambda step: STEP, [ExitCheckpoint(tmp_path)], steps=1)
    assert (tmp_path / "best.ckpt").read_text() == "best"
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 1


def test_a_signal_does_not_replace_an_earlier_reason_to_stop(tmp_path):
    reason = StopReason(exit_code=7, message="first")

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *args):
            stop_run(trainer, reason)
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = fit(lambda step: STEP, [Stop(), ExitCheckpoint(tmp_path)], steps=3)
    assert trainer.global_step == 1
    assert get_stop_reason(trainer) is reason
