"""Metrics of steps reach loggers and callbacks as if Lightning had logged each of them anew."""

import math

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lit_grpo.diagnostics.step_log import StepLog

VALUES = [
    {"a": 0.0, "b": 10.0},
    {"a": 1.0},
    {"a": 2.0, "c": 20.0},
    {"a": 3.0, "b": 11.0},
    {},
]
"""By step; an epoch has two of them."""


class Rows(DummyLogger):
    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_metrics(self, metrics, step=None):
        self.rows.setdefault(step, {}).update(metrics)


class Logging(L.LightningModule):
    """Log the values from two hooks, and count what Lightning logs itself."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.step_logs = StepLog(), StepLog()
        self.number, self.num_logged, self.seen = -1, [0] * len(VALUES), []

    def training_step(self, batch, batch_idx):
        self.number += 1
        self.step_logs[0].log(self, VALUES[self.number])
        return self.weight.sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        values = VALUES[self.number]
        self.step_logs[1].log(self, {f"end/{name}": value for name, value in values.items()})
        self.seen.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})

    def log(self, *args, **kwargs):
        self.num_logged[self.number] += 1
        super().log(*args, **kwargs)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    module, rows = Logging(), Rows()
    trainer = L.Trainer(
        max_steps=len(VALUES),
        logger=rows,
        log_every_n_steps=1,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path_factory.mktemp("run"),
    )
    trainer.fit(module, DataLoader(torch.zeros(2, 1)))
    return module, rows.rows


def expected_row(step: int) -> dict[str, float]:
    """Return what was logged by then, with NaN for what this step does not have."""
    names = {name for values in VALUES[: step + 1] for name in values}
    row = {name: VALUES[step].get(name, math.nan) for name in names}
    return row | {f"end/{name}": value for name, value in row.items()}


def test_every_row_has_the_values_of_its_step_and_nan_for_those_it_lacks(run):
    _, rows = run
    assert sorted(rows) == list(range(len(VALUES)))
    for step, row in rows.items():
        logged = {name: float(value) for name, value in row.items() if name != "epoch"}
        assert logged == pytest.approx(expected_row(step), nan_ok=True)


def test_callbacks_see_the_values_of_the_step(run):
    module, _ = run
    for step, seen in enumerate(module.seen):
        assert seen == pytest.approx(expected_row(step), nan_ok=True)


def test_only_the_first_metric_of_a_hook_and_new_ones_are_logged_anew(run):
    module, _ = run
    assert module.num_logged == [4, 2, 4, 2, 2]
