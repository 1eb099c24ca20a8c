"""Runs of a tiny model that a test leaves at a known place, and compares with undisturbed ones."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import torch
from _checks import step_metrics
from _tiny_model import SPREAD_LLAMA
from forked_ranks import Importer
from killed_run import TIMELESS
from paths import SUPPORT
from safetensors.torch import load_file
from served_engines import PROGRAM, QUICK
from sglang_server import OFFLINE

from lit_grpo.distributed.checkpoints import read_others

NUM_STEPS = 5
HELD_STEP = 2
WITH_SUPPORT = {"PYTHONPATH": str(SUPPORT)}
NUM_ROWS = 16
"""Completions of a step, over all ranks."""


def config(*callbacks: dict, reward: dict | None = None, **trainer) -> dict:
    """Return a config of a tiny model that is validated at every second step."""
    return {
        "trainer": {
            "accelerator": "cpu",
            "max_steps": NUM_STEPS,
            "check_val_every_n_epoch": None,
            "val_check_interval": 2,
            "enable_progress_bar": False,
            "callbacks": list(callbacks),
            **trainer,
        },
        "model": {
            "policy": {"architecture": SPREAD_LLAMA},
            "group_size": 4,
            "sampling": {"max_tokens": 6, "min_tokens": 6},
            "rewards": [reward or {"class_path": "small_runs.ShareOfLowBytes"}],
            "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.003}},
            "evaluation": {"before_training": False},
        },
        "data": {
            "class_path": "AdditionData",
            "init_args": {
                "num_digits": 1,
                "validation_size": 8,
                "validation_batch_size": 4,
                "train_size": 40,
                "prompts_per_step": 4,
            },
        },
    }


def hold(stage: str, step: int = HELD_STEP) -> dict:
    return {"class_path": "holds.HoldStage", "init_args": {"stage": stage, "step": step}}


def held_reward(kind: str = "HeldReward", *, num_ranks: int = 1, **settings) -> dict:
    """Return a reward that stops to score within the step that is held."""
    call = HELD_STEP * NUM_ROWS // num_ranks + 5
    settings = {"call": call, "name": "share_of_low_bytes", **settings}
    return {"class_path": f"holds.{kind}", "init_args": settings}


def with_server(step: int, program: list[str] = PROGRAM, **trainer) -> dict:
    """Return a config with a server that is silent from the weight update of a step on."""
    silence = {"class_path": "holds.SilenceServers", "init_args": {"step": step}}
    settings = config(silence, **trainer)
    settings["model"]["engine"] = {
        "class_path": "SGLangEngine",
        "init_args": {
            "launch": {"program": program, "env": OFFLINE},
            "supervision": QUICK | {"health_timeout": 600, "weight_sync_timeout": 600},
        },
    }
    return settings


NEVER_READY = ["/bin/sh", "-c", "sleep 1000"]


def words(*more: str) -> list[str]:
    """Return the arguments of ``lit-grpo``."""
    return ["fit", "--config", "run.json", "--run_dir", "run", *more]


def begin(directory: Path, settings: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.json").write_text(json.dumps(settings))
    return directory


def finish(
    importer: Importer, directory: Path, *more: str, num_ranks: int = 0, **variables: str
) -> None:
    """Train to the end, held nowhere."""
    (directory / "go").touch()
    arguments = words("--ckpt_path", "auto", *more)
    importer.run(arguments, directory, num_ranks=num_ranks, **variables)


def said(directory: Path, rank: int | str = "") -> str:
    return (directory / f"said{rank}.txt").read_text()


def metrics(directory: Path) -> pd.DataFrame:
    table = step_metrics(directory / "run")
    return table[["step", *(name for name in table if name.startswith(TIMELESS))]]


def saved_step(directory: Path) -> int:
    path = directory / "run" / "checkpoints" / "last.ckpt"
    saved = read_others(path) if path.is_dir() else torch.load(path, weights_only=False)
    step: int = saved["rollout_step"]
    return step


def assert_same_runs(one: Path, other: Path) -> None:
    weights = [load_file(run / "run" / "final" / "model.safetensors") for run in (one, other)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    tables = [metrics(run) for run in (one, other)]
    pd.testing.assert_frame_equal(*(table[sorted(table)] for table in tables))
