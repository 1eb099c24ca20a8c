"""The order of prompts under a trainer that is stopped, resumed or runs on two processes."""

import json
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
from data_runs import Recorder, SaveEverywhere, fit, flat, sums
from small_runs import make_trainer

from lit_grpo.data import AdditionData


class StopAndSave(pl.Callback):
    """Stop at the end of a batch and save when training has ended, as a graceful exit does."""

    def __init__(self, step: int, path: Path):
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer, module, *_):
        trainer.should_stop = len(module.trained) == self.step

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


STOPPED_BY_STEPS = [
    {},
    {"limit_train_batches": 2},
    {"val_check_interval": 2, "check_val_every_n_epoch": None},
]


@pytest.mark.parametrize(
    "choices",
    [*({"max_steps": 8, **choices} for choices in STOPPED_BY_STEPS), {"max_epochs": 3}],
    ids=["steps", "limited epochs", "validation by steps", "epochs"],
)
def test_a_run_resumed_from_any_checkpoint_continues_with_the_prompts_of_an_uninterrupted_run(
    tmp_path, choices
):
    choices = {"max_steps": -1, **choices}
    saver = SaveEverywhere(tmp_path)
    expected = fit(sums(), saver, **choices).trained
    assert {hook for _, hook, _ in saver.saved} == {"batch end", "validation end", "epoch end"}
    assert len({tuple(batch) for batch in expected}) == len(expected) >= 8
    for step, hook, path in saver.saved:
        resumed = fit(sums(), checkpoint=path, **choices).trained
        assert resumed == expected[step:], f"{hook} after step {step}"


@pytest.mark.parametrize("choices", STOPPED_BY_STEPS, ids=["steps", "limited", "validation"])
def test_a_run_that_stops_and_then_saves_continues_exactly(tmp_path, choices):
    expected = fit(sums(), max_steps=8, **choices).trained
    for step in range(1, 8):
        path = tmp_path / f"{step}.ckpt"
        stopped = fit(sums(), StopAndSave(step, path), max_steps=8, **choices).trained
        resumed = fit(sums(), checkpoint=path, max_steps=8, **choices).trained
        assert stopped + resumed == expected, f"stopped after step {step}"


def test_resuming_is_exact_when_the_module_reads_the_number_of_steps_first(tmp_path):
    class Scheduled(Recorder):
        def configure_optimizers(self):
            self.total = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    def run(*callbacks, checkpoint=None):
        module = Scheduled()
        trainer = make_trainer(*callbacks, max_steps=-1, max_epochs=3)
        trainer.fit(module, datamodule=sums(), ckpt_path=checkpoint)
        return module.trained

    saver = SaveEverywhere(tmp_path)
    expected = run(saver)
    for step, hook, path in saver.saved:
        assert run(checkpoint=path) == expected[step:], f"{hook} after step {step}"


def test_the_trainer_does_not_warn_about_the_loaders(tmp_path):
    path = tmp_path / "2.ckpt"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(sums(), StopAndSave(2, path), max_steps=6)
        fit(sums(), checkpoint=path, max_steps=6)
    texts = [str(warning.message) for warning in caught]
    assert not [text for text in texts if "loader" in text or "worker" in text or "resum" in text]


TWO_PROCESSES = """
import json, sys
import torch
from data_runs import Recorder
from small_runs import make_trainer
from lit_grpo.data import AdditionData

torch.set_num_threads(1)
data = AdditionData(1, train_size=13, validation_size=5, prompts_per_step=4)
trainer = make_trainer(
    devices=2, strategy="ddp", max_steps=-1, max_epochs=2, num_sanity_val_steps=0
)
module = Recorder()
trainer.fit(module, datamodule=data)
with open(f"{sys.argv[1]}/{trainer.global_rank}.json", "w") as file:
    json.dump([module.trained, module.evaluated], file)
"""


@pytest.mark.slow
def test_two_processes_share_the_batches_of_one(tmp_path, importer):
    (tmp_path / "train.py").write_text(TWO_PROCESSES)
    importer.run(["2", "train.py", str(tmp_path)], tmp_path, program="forked_program")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    data = AdditionData(1, train_size=13, validation_size=5, prompts_per_step=4)
    alone = fit(data, max_epochs=2, max_steps=-1)
    (left_trained, left_evaluated), (right_trained, right_evaluated) = ranks
    joined = [left + right for left, right in zip(left_trained, right_trained, strict=True)]
    assert joined == alone.trained
    assert len(left_evaluated) == len(right_evaluated)
    assert sorted(flat(left_evaluated + right_evaluated)) == sorted(flat(alone.evaluated))
