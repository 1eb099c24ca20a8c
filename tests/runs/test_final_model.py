"""The final model: when it is written, and what it replaces."""

import torch
from safetensors.torch import load_file
from tiny import tiny_policy
from toy_rollouts import fit, outputs, rollouts, train_batch

from lit_grpo.callbacks import Checkpoints
from lit_grpo.runs.final_model import FinalModel
from lit_grpo.stopping import stop_run
from lit_grpo.types import StopReason

STEP = outputs(rollouts([[0.0, 1.0]]), train_batch([-1.0, 1.0]))


class WithPolicy(FinalModel):
    """Adds the policy that a real module has to the toy module."""

    def setup(self, trainer, pl_module, stage):
        pl_module.policy = tiny_policy()


def test_an_older_model_is_kept_beside_the_final_one(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "old").touch()
    fit(lambda step: STEP, [WithPolicy(tmp_path)], steps=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "final.0"]
    assert [path.name for path in (tmp_path / "final.0").iterdir()] == ["old"]
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert names >= {"config.json", "model.safetensors"}
    assert "old" not in names


def test_a_final_model_that_a_kill_at_the_end_has_prevented_comes_with_the_next_start(tmp_path):
    def run(**options):
        saving = Checkpoints(dirpath=str(tmp_path / "checkpoints"))
        fit(lambda step: STEP, [saving, WithPolicy(tmp_path)], steps=2, **options)

    run()
    written = tmp_path / "final" / "model.safetensors"
    weights = load_file(written)
    written.parent.rename(tmp_path / "elsewhere")
    run(ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    torch.testing.assert_close(load_file(written), weights, rtol=0, atol=0)


class Stop(WithPolicy):
    def on_train_batch_end(self, trainer, *args):
        stop_run(trainer, StopReason(exit_code=3, message="enough"))


def test_a_stopped_run_has_no_final_model(tmp_path):
    fit(lambda step: STEP, [Stop(tmp_path)], steps=1)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_that_trains_on_and_is_stopped_has_no_model_of_an_earlier_step(tmp_path):
    def run(final, steps, **options):
        saving = Checkpoints(dirpath=str(tmp_path / "checkpoints"))
        fit(lambda step: STEP, [saving, final(tmp_path)], steps=steps, **options)

    run(WithPolicy, 2)
    run(Stop, 4, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "final.0"}
    run(WithPolicy, 3, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")  # nothing is left to train
    assert (tmp_path / "final").exists()
