"""A checkpoint becomes the Hugging Face model that the run would have written, or has written."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from cli_base import BASE
from tiny import LLAMA, tiny_policy
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_grpo.__main__ import main
from lit_grpo.policy import LoRA

IDS = torch.tensor([[1, 2, 3, 4]])
LORA = {"rank": 3, "modules_to_save": ["lm_head"]}
KINDS = {
    "adapter": {"architecture": LLAMA, "lora": LORA},
    "adapter of a loaded model": {"path": "start", "lora": LORA},
    "adapter alone": {"path": "start", "lora": {"rank": 3}, "merge_lora": False},
    "whole model": {"path": "start", "dtype": "bfloat16"},
}


def train(command: str, policy: dict) -> None:
    """Train for three steps, with a checkpoint of each."""
    saving = {"class_path": "Checkpoints", "init_args": {"every_n_steps": 1, "keep_last": 9}}
    rewards = ["small_runs.ShareOfLowBytes"]  # they differ between random completions
    model = BASE["model"] | {"policy": policy, "rewards": rewards, "sampling": {"max_tokens": 8}}
    if command == "sft":
        model = {key: model[key] for key in ("policy", "sampling", "evaluation")}
    model["optimizer"] = {"class_path": "SGD", "init_args": {"lr": 1.0}}
    trainer = BASE["trainer"] | {"max_steps": 3, "callbacks": [saving]}
    config = BASE | {"trainer": trainer, "model": model}
    Path("base.yaml").write_text(yaml.safe_dump(config))
    assert main([command, "--config=base.yaml", "--run_dir=run"]) == 0


def contents(directory: str) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in Path(directory).iterdir()
        if path.name != "README.md"  # which only a training run knows
    }


def test_the_last_checkpoint_of_a_run_is_its_final_model(here, capsys):
    train("sft", KINDS["adapter"])
    capsys.readouterr()
    assert main(["checkpoints", "run", "--export", "model"]) == 0
    said = capsys.readouterr()
    of = "run/checkpoints/step_000003.ckpt after rollout step 3"
    assert said.out == f"model has the model of {of}\n"
    assert said.err == ""
    assert contents("model") == contents("run/final")

    saved = torch.load("run/checkpoints/step_000003.ckpt", weights_only=True)["state_dict"]
    policy = tiny_policy(lora=LoRA(**LORA), seed=7)
    policy.load_state_dict({name.removeprefix("policy."): one for name, one in saved.items()})
    exported = AutoModelForCausalLM.from_pretrained("model")
    with torch.no_grad():
        torch.testing.assert_close(exported(IDS).logits, policy.model(IDS).logits)
    tokenizer = AutoTokenizer.from_pretrained("model")
    assert tokenizer("7+8=")["input_ids"] == policy.tokenizer("7+8=")["input_ids"]

    assert main(["checkpoints", "run", "--before_step", "3", "--export", "earlier"]) == 0
    assert contents("earlier")["config.json"] == contents("model")["config.json"]
    assert contents("earlier")["model.safetensors"] != contents("model")["model.safetensors"]
    assert capsys.readouterr().out.endswith("step_000002.ckpt after rollout step 2\n")
    card = Path("earlier/README.md").read_text()
    assert "# SFT from a llama model with random weights\n" in card
    step = "after rollout step 2, 2 optimizer steps"
    assert f"- **Checkpoint:** step_000002.ckpt of {here.name}/run, {step}\n" in card
    assert "max_steps: 3" in card  # the run's config.yaml


@pytest.mark.slow
@pytest.mark.parametrize("command", ["fit", "sft"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_policy_of_any_training_is_exported_as_it_was_written(kind, command, here):
    tiny_policy(seed=3).save_pretrained("start")
    train(command, KINDS[kind])
    assert main(["checkpoints", "run", "--export", "model"]) == 0
    assert contents("model") == contents("run/final")
    assert main(["checkpoints", "run", "--before_step", "2", "--export", "first"]) == 0
    assert contents("first") != contents("model")  # the training has changed it


@pytest.fixture
def checkpoint(here) -> Path:
    """The checkpoint of a run whose config has a policy of random weights."""
    policy = tiny_policy()
    state = {f"policy.{name}": weight for name, weight in policy.state_dict().items()}
    path = here / "run/checkpoints/step_000001.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"state_dict": state}, path)
    config = {"model": {"policy": {"architecture": LLAMA}}}
    (here / "run/config.yaml").write_text(yaml.safe_dump(config))
    return path


def failure(capsys, *arguments: str) -> str:
    assert main(["checkpoints", "run", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_a_directory_with_files_is_left_as_it_is(here, checkpoint, capsys):
    (here / "model").mkdir()
    assert main(["checkpoints", "run", "--export", "model"]) == 0  # an empty one is not refused
    before = contents("model")
    said = failure(capsys, "--export", "model")
    assert "--export must be a new or empty directory, got model, a directory with files." in said
    assert "got run/config.yaml, a file." in failure(capsys, "--export", "run/config.yaml")
    assert contents("model") == before


@pytest.mark.parametrize("options", [[], ["--dry_run"]])
@pytest.mark.parametrize("place", ["run/config.yaml/model", "run/config.yaml/deep/model"])
def test_a_directory_that_cannot_be_made_is_told_with_the_option(
    place, options, checkpoint, capsys
):
    said = failure(capsys, "--export", place, *options)
    assert said.startswith(f"error: export must be a place that can be written, got {place} (")
    assert said.endswith("/run/config.yaml: Not a directory). Set --export.\n")


def test_a_policy_that_is_not_found_here_says_where_the_run_was_started(here, monkeypatch, capsys):
    tiny_policy(seed=3).save_pretrained("start")
    train("sft", KINDS["whole model"] | {"path": "./start"})
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    capsys.readouterr()
    assert main(["checkpoints", "../run", "--before_step", "3", "--export", "model"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "'./start': there is no such directory." in said
    assert " --export takes it from ../run/config.yaml." in said
    assert f" The run was last started in {here}." in said
    command = said.partition("go on with: ")[2]
    model = here / "elsewhere/model"
    assert command == (f"cd {here} && lit-grpo checkpoints run --before_step 3 --export {model}")
    monkeypatch.chdir(here)
    assert main(shlex.split(command)[4:]) == 0
    assert (model / "config.json").is_file()


def test_a_policy_class_that_is_missing_here_is_one_line(here, checkpoint, capsys):
    policy = {"class_path": "gone.Mine", "init_args": {"architecture": LLAMA}}
    (here / "run/config.yaml").write_text(yaml.safe_dump({"model": {"policy": policy}}))
    assert "No module named 'gone'" in failure(capsys, "--export", "model")


def test_a_dry_run_writes_nothing(here, checkpoint, capsys):
    assert main(["checkpoints", "run", "--export", "model", "--dry_run"]) == 0
    said = capsys.readouterr().out
    assert said == "model would get the model of run/checkpoints/step_000001.ckpt\n"
    assert not Path("model").exists()


def test_a_run_made_in_python_has_no_config_to_export_by(here, checkpoint, capsys):
    (here / "run/config.yaml").unlink()
    said = failure(capsys, "--export", "model")
    assert "--export makes the policy from run/config.yaml, and there is none" in said
    call = "lit_grpo.export_checkpoint('run/checkpoints/step_000001.ckpt', DIRECTORY, policy="
    assert call in said
    assert not Path("model").exists()


def test_a_checkpoint_of_a_different_policy_is_refused_in_one_line(here, checkpoint, capsys):
    saved = torch.load(checkpoint)
    torch.save(
        {"state_dict": {"policy.model.more": torch.ones(1), **saved["state_dict"]}}, checkpoint
    )
    said = failure(capsys, "--export", "model")
    assert "1 weights are in one of them only, such as 'model.more'" in said
    saved["state_dict"]["policy.model.model.norm.weight"] = torch.ones(3)
    torch.save(saved, checkpoint)
    assert "does not fit the policy of the run" in failure(capsys, "--export", "model")
    assert sorted(os.listdir()) == ["run"]


@pytest.mark.slow
def test_a_model_under_the_policys_path_that_was_replaced_is_refused(here, capsys):
    """The adapter of the checkpoint would be added to weights that it was not trained with."""
    tiny_policy(seed=3).save_pretrained("start")
    train("sft", KINDS["adapter of a loaded model"])
    tiny_policy(seed=4).save_pretrained("start")
    capsys.readouterr()
    assert main(["checkpoints", "run", "--export", "model"]) == 2
    assert (
        "model.policy.path must have the weights that the run began with" in capsys.readouterr().err
    )
    assert not Path("model").exists()
    assert main(["sft", "run", "--trainer.max_steps=4"]) == 2
    assert "those of start have been replaced since" in capsys.readouterr().err
    tiny_policy(seed=3).save_pretrained("start")
    assert main(["sft", "run", "--trainer.max_steps=4"]) == 0
