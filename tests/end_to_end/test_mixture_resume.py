"""A run on several sources in phases that is killed in every phase ends bit for bit the same."""

import os
import signal
from pathlib import Path
from subprocess import Popen

import pandas as pd
import pytest
import torch
import yaml
from engine_runs import command, num_steps
from engine_runs import start as start_process
from forked_programs import LitGRPO
from killed_run import TIMELESS
from paths import ROOT, SUPPORT
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
        "policy": {
            "architecture": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "initializer_range": 0.1,
            }
        },
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


TWO_RANKS = ("--trainer.devices=2", "--trainer.strategy=ddp")


def start(directory: Path, *more: str) -> LitGRPO | Popen[str]:
    words = [*command("fit", "../run.yaml", {}), *more]
    variables = {"PYTHONPATH": f"{SUPPORT}:{ROOT}"}
    if set(TWO_RANKS) <= set(more):  # the second rank is started by the command line of the first
        return start_process(words, directory, **variables)
    return LitGRPO(words[3:], directory, os.environ | variables, directory / "said.txt")


def finish(process: LitGRPO | Popen[str], directory: Path) -> None:
    assert process.wait(300) == 0, (directory / "said.txt").read_text()


def kill_after(directory: Path, number: int, *more: str) -> None:
    """Kill a run before a rollout step, at which it waits so that the signal is never too late."""
    hold = {"class_path": "holds.HoldRun", "init_args": {"step": number}}
    (directory / "hold.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": [hold]}}))
    process = start(directory, "--config=hold.yaml", *more)
    wait_until(lambda: process.poll() is not None or num_steps(directory) >= number, 240)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, (directory / "said.txt").read_text()


def table(directory: Path) -> pd.DataFrame:
    found = pd.read_csv(directory / "run" / "metrics.csv")
    return found[["step", *(name for name in found if name.startswith((*TIMELESS, *OF_MIXTURE)))]]


@pytest.mark.parametrize("ranks", [(), TWO_RANKS], ids=["one rank", "two ranks"])
def test_a_run_killed_in_every_phase_ends_as_an_undisturbed_one(tmp_path, ranks):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    undisturbed = start(whole, *ranks)
    resume = ranks
    for number in KILLED_AT:
        kill_after(broken, number, *resume)
        resume = (*ranks, "--ckpt_path", "last")
    finish(start(broken, *resume), broken)
    finish(undisturbed, whole)
    ours, theirs = (
        load_file(one / "run" / "final" / "model.safetensors") for one in (broken, whole)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    tables = [table(one) for one in (whole, broken)]
    assert tables[0]["curriculum/phase"].tolist() == [1] * 5 + [2] * 3 + [3] * 4
    assert tables[0]["adaptive/verifiable/normal"].nunique() > 3
    assert tables[0]["dynamic_sampling/sampled_per_group"].max() > 1
    pd.testing.assert_frame_equal(*tables)
