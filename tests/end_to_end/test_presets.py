"""Every preset trains the built-in task, from its own config."""

import math
from importlib.resources import files

import pandas as pd
import pytest
import torch
from engine_runs import warmed_up
from run_logs import workplace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_grpo.__main__ import main

pytestmark = pytest.mark.slow

PRESETS = sorted(
    path.name.removesuffix(".yaml") for path in (files("lit_grpo.configs") / "presets").iterdir()
)
NUM_STEPS = 20
SETTINGS = {
    "trainer.max_steps": 2 * NUM_STEPS,
    "trainer.val_check_interval": NUM_STEPS,
    "model.optimizer.lr": 1e-4,
    "model.update.minibatches": 2,
    "data.init_args.prompts_per_step": 8,
    "data.init_args.validation_size": 16,
    "data.init_args.train_size": 200,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return warmed_up(tmp_path_factory)


@pytest.fixture(scope="module")
def teacher(policy, tmp_path_factory):
    """Another policy with the same vocabulary."""
    directory = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(policy).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_the_built_in_task_for_20_steps(name, policy, teacher, tmp_path):
    words = ["fit", "--config", "quickstart", "--config", f"presets/{name}", "--run_dir", "run"]
    settings = SETTINGS | {"model.policy.path": policy}
    if name == "on_policy_distillation":
        settings |= {"model.teacher.path": teacher}
    words += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    with workplace(tmp_path):
        assert main(words) == 0
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert len(metrics["policy/loss"].dropna()) == NUM_STEPS
    for column in ("policy/loss", "policy/grad_norm", "advantage/abs_mean", "policy/entropy"):
        assert metrics[column].dropna().map(math.isfinite).all(), column
    assert (metrics["policy/grad_norm"].dropna() > 0).any()
    before, after = (
        load_file(directory / "model.safetensors") for directory in (policy, tmp_path / "run/final")
    )
    assert any(not before[key].equal(after[key]) for key in before)
