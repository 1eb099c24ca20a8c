"""Runs of `lit_grpo.Trainer` with a tiny model."""

from lightning.pytorch.callbacks import Callback
from run_logs import close_logs
from small_runs import make_module

from lit_grpo import AdditionData, Trainer
from lit_grpo.callbacks import Checkpoints
from lit_grpo.stopping import stop_run
from lit_grpo.types import StopReason


class StopAfter(Callback):
    def __init__(self, num_steps):
        self.num_steps = num_steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.rollout_step == self.num_steps:
            stop_run(trainer, StopReason(exit_code=20, message="enough for now"))


def train(
    run_dir,
    *callbacks,
    ckpt_path=None,
    max_steps=3,
    changed=None,
    allow_changes=False,
    **settings,
):
    changed = dict(changed or {})
    of_data = {"train_size": 8, "prompts_per_step": 2, "validation_size": 0}
    of_data |= changed.pop("data", {})
    module = make_module(**{"group_size": 2} | changed)
    data = AdditionData(1, **of_data)
    callbacks = [Checkpoints(dirpath=str(run_dir / "checkpoints")), *callbacks]
    settings |= {"accelerator": "cpu", "enable_progress_bar": False}
    trainer = Trainer(run_dir, max_steps=max_steps, callbacks=callbacks, **settings)
    try:
        trainer.fit(module, data, ckpt_path=ckpt_path, allow_changes=allow_changes)
    finally:
        close_logs()
    return trainer, module
