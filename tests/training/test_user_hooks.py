"""Exceptions of the user's hooks that Lightning's loops or Python would take for something else."""

import os
import signal
import sys

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from small_runs import fit_and_evaluate, make_module

from lit_grpo.training.user_hooks import guard_hooks

HOOKS = (
    "on_train_batch_start",
    "on_rollouts",
    "on_stage_end",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


def raising(hook: str, error: BaseException) -> Callback:
    def fail(self, *arguments):
        raise error

    return type("Mine", (Callback,), {hook: fail})()


@pytest.mark.parametrize("hook", HOOKS)
def test_an_iterator_without_a_further_item_ends_the_run(hook):
    with pytest.raises(RuntimeError, match=rf"StopIteration in Mine\.{hook}: ") as caught:
        fit_and_evaluate(make_module(), raising(hook, StopIteration()))
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("code", [0, None, "done", 3])
def test_sys_exit_ends_the_run_with_what_to_call_instead(code):
    callback = raising("on_train_batch_end", SystemExit(code))
    with pytest.raises(
        RuntimeError, match=r"Mine\.on_train_batch_end left by sys\.exit\(.*stop_run"
    ):
        fit_and_evaluate(make_module(), callback)


def test_an_error_of_a_hook_is_raised_with_the_hook_and_the_keys_that_there_are():
    def look_up(self, trainer, module, outputs, *arguments):
        outputs["loss"]

    callback = type("Mine", (Callback,), {"on_train_batch_end": look_up})()
    with pytest.raises(KeyError) as caught:
        fit_and_evaluate(make_module(), callback)
    (note,) = caught.value.__notes__
    assert note.startswith("Raised in the hook Mine.on_train_batch_end. The dict that it was ")
    assert "'metrics'" in note
    with pytest.raises(OSError, match="no disk") as caught:
        fit_and_evaluate(make_module(), raising("on_validation_end", OSError("no disk")))
    assert caught.value.__notes__ == ["Raised in the hook Mine.on_validation_end."]


def test_a_signal_that_comes_within_a_hook_passes():
    callback = raising("on_train_batch_end", SystemExit(128 + signal.SIGTERM))
    guard_hooks(callback)
    with pytest.raises(SystemExit):
        callback.on_train_batch_end()


def test_a_hook_does_what_it_did_and_is_wrapped_once():
    class Mine(Callback):
        @torch.no_grad()
        def on_train_batch_end(self, trainer, module, outputs, *arguments):
            return "mine", outputs, torch.is_grad_enabled()

    callback = Mine()
    for _ in range(2):
        guard_hooks(callback)
    guarded = callback.on_train_batch_end
    assert guarded(None, None, 3) == ("mine", 3, False)
    assert not hasattr(guarded.__wrapped__, "is_guard")


def test_functions_of_a_lambda_callback_are_the_users_and_hooks_of_libraries_are_not():
    callback = LambdaCallback(on_train_end=lambda *arguments: sys.exit(0))
    guard_hooks(callback)
    with pytest.raises(RuntimeError, match=r"LambdaCallback\.on_train_end left by sys.exit\(0\)"):
        callback.on_train_end()
    library = ModelCheckpoint(dirpath=os.devnull)
    guard_hooks(library)
    assert "on_train_batch_end" not in vars(library)
