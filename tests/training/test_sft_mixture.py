"""``lit-grpo sft`` on a mixture in phases, and what doctor says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import run_logs
import torch
import yaml
from safetensors.torch import load_file
from tiny import LLAMA

from lit_grpo.__main__ import main

MIXTURE: dict[str, Any] = {
    "prompts_per_step": 4,
    "sources": {
        "sums": {"data": {"class_path": "PromptData", "init_args": {"train": "sums.jsonl"}}},
        "words": {
            "data": {
                "class_path": "PromptData",
                "init_args": {"train": "words.jsonl", "require_answer": False},
            }
        },
    },
    "curriculum": [
        {"weights": {"sums": 0.75, "words": 0.25}, "fraction": 0.5},
        {"weights": {"sums": 0.25, "words": 0.75}, "fraction": 0.5, "lr_scale": 0.5},
    ],
}
CONFIG: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": 6,
        "callbacks": [
            {"class_path": "Checkpoints", "init_args": {"every_n_steps": 2, "keep_last": 9}}
        ],
    },
    "model": {
        "policy": {"architecture": LLAMA},
        "target_column": "completion",
        "sampling": {"max_tokens": 8},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.01}},
    },
    "data": {"class_path": "MixtureData", "init_args": MIXTURE},
}


@pytest.fixture(autouse=True)
def here(tmp_path) -> Iterator[Path]:
    """The working directory, with the config and rows of which only sums have a gold answer."""
    sums = [
        {"prompt": f"{n}+1=", "answer": str(n + 1), "completion": f"{n}+1={n + 1}"}
        for n in range(9)
    ]
    words = [{"prompt": f"say {n}: ", "completion": f"word {n}"} for n in range(9)]
    with run_logs.workplace(tmp_path):
        for name, rows in (("sums", sums), ("words", words)):
            Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        Path("mix.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
        yield tmp_path


def final_weights(run: str) -> dict[str, torch.Tensor]:
    return load_file(f"{run}/final/model.safetensors")


@pytest.mark.slow
def test_a_warm_up_goes_through_its_phases_and_resumes_to_the_same_weights(here):
    assert main(["sft", "--config=mix.yaml", "--run_dir=whole"]) == 0
    metrics = pd.read_csv("whole/metrics.csv")
    assert metrics["data/sums/share"].tolist() == [0.75] * 3 + [0.25] * 3
    assert metrics["curriculum/phase"].tolist() == [1] * 3 + [2] * 3
    assert metrics["sft/lr"].tolist() == pytest.approx([0.01] * 3 + [0.005] * 3)
    # In the second phase, at the end of an epoch without validation.
    checkpoint = "--ckpt_path=whole/checkpoints/step_000004.ckpt"
    assert main(["sft", "--config=mix.yaml", "--run_dir=resumed", checkpoint]) == 0
    assert "the phases of the curriculum ended" not in Path("resumed/run.log").read_text()
    one, other = final_weights("whole"), final_weights("resumed")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_longer_run_says_once_that_its_phases_end_elsewhere(here):
    assert main(["sft", "--config=mix.yaml", "--run_dir=whole"]) == 0
    assert main(["sft", "whole", "--trainer.max_steps=8"]) == 0
    said = Path("whole/run.log").read_text()
    assert said.count("ended after the optimizer steps [3] and end now after [4]") == 1


def test_a_run_says_which_sources_its_accuracy_leaves_out(here):
    words = ["--data.sources.sums.data.validation_size=2", "--trainer.max_steps=1"]
    words += ["--data.curriculum=null", "--model.evaluation.before_training=false"]
    assert main(["sft", "--config=mix.yaml", "--run_dir=run", *words]) == 0
    assert "val/accuracy covers sums, and not words (" in Path("run/run.log").read_text()


def test_doctor_knows_that_a_warm_up_on_a_mixture_can_start(here, capsys):
    assert main(["doctor", "--config=mix.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "18 training prompts" in shown
    assert "Ready to start" in shown
    assert "have no gold answer" not in shown  # nothing compares with one


@pytest.mark.parametrize("command", ["doctor", "sft"])
def test_adaptive_sources_are_refused_by_doctor_as_by_the_warm_up(command, here, capsys):
    adaptive = "--data.sources.sums.adaptive={success: 1.0}"
    assert main([command, "--config=mix.yaml", adaptive]) == (1 if command == "doctor" else 2)
    said = capsys.readouterr()
    shown = " ".join((said.out + said.err).split())
    assert "adaptive of a source in data.sources must be null in a warm-up, which has no" in shown
