"""A run on several sources in phases that is killed in every phase ends bit for bit the same."""

import signal
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from _checks import step_metrics
from _tiny_model import SPREAD_LLAMA
from engine_runs import num_steps
from forked_ranks import Importer, Ranks
from killed_run import TIMELESS
from safetensors.torch import load_file
from worker_processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": 12,
        "check_val_every_n_epoch": None,
        "val_check_interval": 3,
        "callbacks": [{"class_path": "Checkpoints", "init_args": {"every_n_steps": 2}}],
    },
    "model": {
        "policy": {"architecture": SPREAD_LLAMA},
        "group_size": 4,
        "dynamic_sampling_rounds": 1,
        "sampling": {"max_tokens": 4},
        "rewards": [
            {
                "class_path": "FormatReward",
                "init_args": {"pattern": "[0-9 -~]*", "mode": "full", "name": "printable"},
            },
            {
                "class_path": "LengthReward",
                "init_args": {"start_tokens": 1, "end_tokens": 4, "weight": 0.1},
            },
        ],
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.003}},
        "lr_schedule": "cosine",
        "warmup_steps": 2,
    },
    "data": {
        "class_path": "MixtureData",
        "init_args": {
            "prompts_per_step": 8,
            "curriculum": "0.8:0.2:0.4 0.5:0.5:0.3 0.2:0.8:0.3:0.5",
            "sources": {
                name: {
                    "data": {
                        "class_path": "AdditionData",
                        "init_args": {"num_digits": digits, "validation_size": 8, "train_size": 20},
                    },
                    "adaptive": {"success": 0.8, "rest_epochs": 0.5} if digits == 1 else None,
                }
                for name, digits in (("verifiable", 1), ("open", 2))
            },
        },
    },
}
OF_MIXTURE = ("adaptive/", "curriculum/", "data/", "dynamic_sampling/")
KILLED_AT = (3, 7, 10)
"""A rollout step of each of the three phases."""


@dataclass(frozen=True)
class Runs:
    """How runs are started: in a process, or on so many ranks."""

    importer: Importer
    num_ranks: int

    def start(self, directory: Path, *more: str) -> AbstractContextManager[Ranks]:
        words = ["fit", "--config", "../run.yaml", "--run_dir", "run", *more]
        if self.num_ranks:
            words += [f"--trainer.devices={self.num_ranks}", "--trainer.strategy=ddp"]
        return self.importer.running(words, directory, num_ranks=self.num_ranks)

    def kill_after(self, directory: Path, number: int, *more: str) -> None:
        """Kill a run before a rollout step, at which it waits so that this is never too late."""
        hold = {"class_path": "holds.HoldRun", "init_args": {"step": number}}
        (directory / "hold.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": [hold]}}))
        with self.start(directory, "--config=hold.yaml", *more) as ranks:
            wait_until(lambda: not ranks.are_running() or num_steps(directory) >= number, 240)
            assert ranks.are_running(), said(directory)
            ranks.kill()
            assert {*ranks.wait(60)} == {-signal.SIGKILL}, said(directory)


def said(directory: Path) -> str:
    return "".join(one.read_text() for one in sorted(directory.glob("said*.txt")))


def table(directory: Path) -> pd.DataFrame:
    found = step_metrics(directory / "run")
    return found[["step", *(name for name in found if name.startswith((*TIMELESS, *OF_MIXTURE)))]]


@pytest.mark.parametrize("num_ranks", [0, 2], ids=["one process", "two ranks"])
def test_a_run_killed_in_every_phase_ends_as_an_undisturbed_one(tmp_path, importer, num_ranks):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    runs, resume = Runs(importer, num_ranks), ()
    for number in KILLED_AT:
        runs.kill_after(broken, number, *resume)
        resume = ("--ckpt_path", "last")
    for directory, more in ((broken, resume), (whole, ())):
        with runs.start(directory, *more) as ranks:
            assert not any(ranks.wait()), said(directory)
    ours, theirs = (
        load_file(one / "run" / "final" / "model.safetensors") for one in (broken, whole)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    tables = [table(one) for one in (whole, broken)]
    assert tables[0]["curriculum/phase"].tolist() == [1] * 5 + [2] * 3 + [3] * 4
    assert tables[0]["adaptive/verifiable/normal"].nunique() > 3
    assert tables[0]["dynamic_sampling/sampled_per_group"].max() > 1
    pd.testing.assert_frame_equal(*tables)
