"""What ``run.log`` says of a training run, and of how it ended."""

import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback
from python_runs import StopAfter, train

from lit_grpo.types import RankLost


def test_a_run_inside_another_one_is_warned_of(tmp_path):
    outer = tmp_path / "outer"
    train(outer, max_steps=1)
    train(outer / "inner", max_steps=1)
    line = f"run_dir {outer / 'inner'} is inside another run, {outer}, and is moved or d"
    assert (outer / "inner/run.log").read_text().count(line) == 1
    assert "inside another run" not in (outer / "run.log").read_text()


def test_an_exception_is_raised_and_its_traceback_is_in_the_log(tmp_path):
    class Broken(Callback):
        def on_train_batch_end(self, *_):
            raise ZeroDivisionError("of this callback")

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, Broken())
    assert "ZeroDivisionError: of this callback" in (tmp_path / "run.log").read_text()


def test_an_exception_does_not_hide_why_the_run_was_about_to_end(tmp_path):
    class Fails(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            outputs["nothing like this"]

    with pytest.raises(KeyError, match="nothing like this"):
        train(tmp_path, StopAfter(1), Fails())
    assert "The run was about to end: enough for now" in (tmp_path / "run.log").read_text()


def test_a_lost_rank_is_said_with_the_call_that_starts_the_run_again(tmp_path):
    def lose(*_):
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:5] Connection closed by peer")

    with pytest.raises(RankLost, match="Connection closed by peer") as error:
        train(tmp_path, LambdaCallback(on_train_batch_end=lose))
    assert 'again with trainer.fit(…, ckpt_path="auto"): the run goes' in str(error.value)
    assert "--ckpt_path" not in str(error.value)
