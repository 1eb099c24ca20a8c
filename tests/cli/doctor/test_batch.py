"""What ``lit-grpo doctor`` says of a step, of the length of a run and of its checkpoints."""

from __future__ import annotations

import json

import pytest
import yaml
from cli_base import BASE
from doctor_runs import doctor
from needs import needs_deepspeed

from lit_grpo.__main__ import main
from lit_grpo.cli.doctor.batch import several


def watching(kind: str, monitor: str) -> str:
    callback = {"class_path": kind, "init_args": {"monitor": monitor}}
    return f"--trainer.callbacks={json.dumps([callback])}"


@pytest.mark.parametrize("kind", ["EarlyStopping", "Checkpoints"])
def test_a_misspelt_metric_of_a_callback_is_failed_as_by_fit(kind, capsys):
    exit_code, shown = doctor(capsys, watching(kind, "val/acuracy"))
    assert exit_code == 1
    assert f"{kind} watches val/acuracy, which nothing logs." in shown["batch"]
    assert "the best by" not in shown["batch"]
    assert shown["summary"].strip() == "Do not start yet: batch failed."
    assert main(["fit", "--config=base.yaml", watching(kind, "val/acuracy")]) == 2
    (*_, error) = capsys.readouterr().err.splitlines()
    assert error.removeprefix("error: ") in shown["batch"]


def test_without_a_validation_a_metric_of_it_is_failed_and_a_best_checkpoint_a_remark(capsys):
    none = "--data.validation_size=0"
    exit_code, shown = doctor(capsys, watching("EarlyStopping", "val/accuracy"), none)
    assert exit_code == 1
    assert "no validation will run. Set data.validation" in shown["batch"]
    exit_code, shown = doctor(capsys, watching("Checkpoints", "reward/mean"), none)
    assert exit_code == 0
    assert "Checkpoints watches reward/mean at each validation, but no" in shown["batch"]
    assert "the best by" not in shown["batch"]


def test_early_stopping_that_is_never_asked_is_a_remark(capsys):
    callback = {"class_path": "EarlyStopping", "init_args": {"monitor": "reward/mean"}}
    callback["init_args"]["mode"] = "max"
    settings = (f"--trainer.callbacks={json.dumps([callback])}", "--data.validation_size=0")
    exit_code, shown = doctor(capsys, *settings)
    assert exit_code == 0
    assert "the run of 2 steps ends no later than its first epoch, of 4, so it" in shown["batch"]


def test_the_metric_of_the_best_checkpoint_is_shown(capsys):
    exit_code, shown = doctor(capsys, watching("Checkpoints", "val/accuracy"))
    assert exit_code == 0
    assert "the last 2 are kept, and the best by val/accuracy." in shown["batch"]


@needs_deepspeed
def test_what_stage_3_of_deepspeed_refuses_is_failed(capsys):
    words = ["--trainer.devices=2", "--trainer.strategy=deepspeed_stage_3"]
    exit_code, shown = doctor(capsys, *words, "--model.policy.lora.target_modules=[lm_head]")
    assert exit_code == 1
    assert "must leave the output layer as it is in stage 3 of DeepSpeed" in shown["memory"]


def test_a_warm_up_is_checked_too(here, capsys):
    warm = BASE | {"model": {"policy": BASE["model"]["policy"]}}
    (here / "warm.yaml").write_text(yaml.safe_dump(warm))
    exit_code, shown = doctor(capsys, "--model.sampling.max_tokens=3", config="warm.yaml")
    assert exit_code == 0
    assert "2 prompts with their targets per batch" in shown["batch"]


def test_a_learning_rate_far_too_high_is_named(capsys):
    _, shown = doctor(capsys, "--model.optimizer.lr=1e4")
    assert "the learning rate is 10000" in shown["batch"]
    assert "Did you mean 0.0001? Set model.optimizer.lr;" in shown["batch"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trainer.max_steps=-1"], "The run has no end: stop it with Ctrl-C, or set"),
        (["--trainer.max_steps=0"], "Nothing would be trained: trainer.max_steps is 0."),
    ],
)
def test_a_run_without_an_end_or_without_a_step_is_named(words, said, capsys):
    _, shown = doctor(capsys, *words)
    assert said in shown["batch"]
    assert ("no end" in shown["batch"]) == ("no end" in said)


def test_counts_have_their_plural():
    assert several(1, "step") == "1 step"
    assert several(1200, "micro-batch", "micro-batches") == "1,200 micro-batches"
