from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback
from processes import running
from small_runs import fit as fit_module
from small_runs import make_module
from toy_rollouts import fit, outputs, rollouts
from worker_processes import is_alive, wait_until

from lit_grpo import AdditionData, Reward, Trainer
from lit_grpo.stopping import (
    IN_A_CONFIG,
    ExitCode,
    exit_code_of_error,
    exit_code_of_signal,
    for_this_run,
    get_stop_reason,
    stop_run,
)
from lit_grpo.types import EngineFailed, RankLost, StopReason, UserError
from lit_grpo.types.errors import Diverged


class StopTwice(Callback):
    def on_train_batch_end(self, trainer, *args):
        for message in ("first", "second"):
            stop_run(trainer, StopReason(exit_code=7, message=message))


def test_a_stopped_run_ends_after_its_step_without_a_validation_and_keeps_the_first_reason():
    step = outputs(rollouts([[0.0, 1.0]]))
    trainer = fit(lambda _: step, [StopTwice()], steps=3, validate_every=1)
    assert trainer.global_step == 1
    assert get_stop_reason(trainer).message == "first"
    assert "val/accuracy" not in trainer.callback_metrics


class Boom(Reward):
    def score(self, prompt, completion):
        raise KeyError("keywords")


def test_a_trainer_of_lightning_logs_why_it_stopped_and_names_no_files_that_it_does_not_write(
    caplog,
):
    module = make_module(rewards=[Boom()])
    assert fit_module(module, max_steps=2) == [{}]  # the step is undone
    (said,) = (one.message for one in caplog.records if one.levelname == "ERROR")
    assert said.startswith("Stopped because of a bug in reward")
    assert "The step was not trained on." in said
    assert "completions/" not in said


def test_a_trainer_that_logs_its_end_says_once_why_it_stopped(tmp_path, caplog):
    trainer = Trainer(tmp_path, max_steps=2, accelerator="cpu", enable_progress_bar=False)
    data = AdditionData(1, train_size=8, validation_size=0, prompts_per_step=4)
    trainer.fit(make_module(rewards=[Boom()]), data)
    (said,) = (one for one in caplog.messages if "bug in reward" in one)
    assert "the rows that were being scored are in completions/" in said


def test_a_trainer_of_lightning_that_nothing_stops_has_no_reason():
    seen = LambdaCallback(on_fit_end=lambda trainer, module: reasons.append(trainer.stop_reason))
    reasons = []
    fit_module(make_module(), callbacks=[seen])
    assert reasons == [None]


class StopWith(Callback):
    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code

    def on_train_batch_end(self, trainer, *args):
        stop_run(trainer, StopReason(exit_code=self.exit_code, message="enough"))


@pytest.mark.parametrize(
    ("exit_code", "name"),
    [
        (4, "SCORES_ABSENT"),
        (0, "DONE"),
        (ExitCode.SCORES_ABSENT, ""),
        (20, ""),
        (130, ""),
        (143, ""),
    ],
)
def test_a_number_of_a_callback_that_is_taken_is_warned_of_and_used(exit_code, name, caplog):
    step = outputs(rollouts([[0.0, 1.0]]))
    trainer = fit(lambda _: step, [StopWith(exit_code)], steps=3)
    assert get_stop_reason(trainer).exit_code == exit_code
    warnings = [one.message for one in caplog.records if "of a StopReason is taken" in one.message]
    assert len(warnings) == bool(name)
    assert all(f"exit code {exit_code} of" in one for one in warnings)
    assert all(f"write ExitCode.{name} if" in one for one in warnings)


@pytest.mark.parametrize("reason", ["enough for now", 20, None])
def test_what_is_no_reason_to_stop_is_refused_with_what_to_write(reason):
    step = outputs(rollouts([[0.0, 1.0]]))
    stop = LambdaCallback(on_train_batch_end=lambda trainer, *_: stop_run(trainer, reason))
    with pytest.raises(UserError, match=rf"a StopReason, got {reason!r} .*StopReason\(exit_code="):
        fit(lambda _: step, [stop], steps=1)


def test_a_run_below_the_working_directory_is_named_as_one_would_type_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "my runs/0"
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    trainer = Trainer(run_dir="my runs/0")
    assert trainer.default_root_dir == str(run_dir)
    advice = for_this_run(trainer, "Try it: lit-grpo rewards RUN.")
    assert advice == "Try it: lit-grpo rewards 'my runs/0'."
    monkeypatch.chdir("/")
    advice = for_this_run(trainer, "Try it: lit-grpo rewards RUN.")
    assert advice == f"Try it: lit-grpo rewards '{run_dir.relative_to('/')}'."


def test_a_program_is_not_told_to_change_a_config(tmp_path):
    trainer = Trainer(run_dir=tmp_path)
    assert for_this_run(trainer, f"raise it{IN_A_CONFIG}.") == "raise it."
    (tmp_path / "config.yaml").touch()
    assert for_this_run(trainer, f"raise it{IN_A_CONFIG}.") == f"raise it{IN_A_CONFIG}."


def test_a_run_that_nothing_stopped_has_no_reason():
    assert get_stop_reason(fit(lambda _: {}, [], steps=1)) is None


def test_exit_codes_of_signals_are_those_of_shells():
    assert exit_code_of_signal(signal.SIGTERM) == 143
    assert exit_code_of_signal(signal.SIGINT) == ExitCode.INTERRUPTED


def test_exit_codes_of_errors_are_those_of_the_command_line():
    errors = (KeyboardInterrupt(), EngineFailed(), Diverged(), UserError(), ValueError())
    assert [exit_code_of_error(error) for error in errors] == [130, 5, 6, 2, 1]
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.2]:1")
    assert [exit_code_of_error(error) for error in (RankLost(), lost)] == [9, 9]


RANK = """
import os, subprocess, sys, time
from lit_grpo.stopping import end_with_launcher
end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems send no such signal")
@pytest.mark.parametrize("is_launched", [True, False])
def test_a_rank_that_torchrun_has_started_ends_with_it(is_launched, tmp_path):
    """A shell stands for torchrun; the rank is in a session of its own."""
    variables = {"TORCHELASTIC_RUN_ID": "none"} if is_launched else {}
    (tmp_path / "rank.py").write_text(RANK)
    words = ["sh", "-c", '"$@" & wait', "sh", "setsid", sys.executable, "rank.py"]
    with running(words, tmp_path, **variables) as launcher:
        rank = int(launcher.stdout.readline())
        try:
            launcher.kill()
            launcher.wait()
            if is_launched:
                wait_until(lambda: not is_alive(rank))
            else:
                time.sleep(0.5)
                assert is_alive(rank)
        finally:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
