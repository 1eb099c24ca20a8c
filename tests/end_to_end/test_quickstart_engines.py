"""The quickstart on the command line with each engine, and no other change."""

import math

import pandas as pd
import pytest
import torch
import yaml
from _checks import step_metrics
from engine_runs import (
    INTERPRETERS,
    SETTINGS,
    command,
    run_to_its_end,
    warmed_up,
)
from safetensors.torch import load_file
from vllm_environment import needs_vllm
from vllm_settings import ENV

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_STEPS = 3
PROMPTS_PER_STEP = 32
GROUP_SIZE = 4
GRPO = {
    "trainer.max_steps": NUM_STEPS,
    "trainer.val_check_interval": NUM_STEPS,
    "data.init_args.prompts_per_step": PROMPTS_PER_STEP,
    "data.init_args.validation_size": 32,
}
ENGINES = [pytest.param(name, marks=needs_vllm if "VLLM" in name else ()) for name in SETTINGS]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return warmed_up(tmp_path_factory)


def train(policy, engine, directory, importer):
    """Return the run directory of a new interpreter, or of a fork where a server samples."""
    settings = GRPO | {"model.policy.path": str(policy)}
    words = command("fit", "quickstart", settings, engine=engine)
    if engine == "HFEngine" or engine in INTERPRETERS:
        run_to_its_end(words, directory)
    else:
        importer.run(words[3:], directory, **ENV)
    return directory / "run"


@pytest.fixture(scope="module")
def plain_run(policy, tmp_path_factory, importer):
    """The run directory of the shipped quickstart."""
    return train(policy, "HFEngine", tmp_path_factory.mktemp("plain"), importer)


@pytest.fixture
def run(request, policy, plain_run, tmp_path, importer):
    engine = request.param
    return plain_run if engine == "HFEngine" else train(policy, engine, tmp_path, importer)


def config_without_engine(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    engine = config["model"].pop("engine")
    return config, engine["class_path"].rpartition(".")[2]


def completions(run):
    files = sorted((run / "completions").glob("*.parquet"))
    assert len(files) == NUM_STEPS
    return pd.concat(map(pd.read_parquet, files), ignore_index=True)


@pytest.mark.parametrize("run", ENGINES, indirect=True)
def test_the_quickstart_trains_with_the_engine(run, policy, plain_run, request):
    engine = request.node.callspec.params["run"]
    config, name = config_without_engine(run)
    assert name == engine
    assert config == config_without_engine(plain_run)[0]
    assert_all_rows_are_there(completions(run), completions(plain_run))
    assert_trained(step_metrics(run), engine)
    assert pd.read_csv(run / "metrics.csv")["val/accuracy"].notna()[0]  # before training
    before, after = (load_file(path / "model.safetensors") for path in (policy, run / "final"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def assert_all_rows_are_there(rows, plain_rows):
    """Check the completions; the prompts are the same for every engine, in the same order."""
    assert rows["prompt_id"].tolist() == plain_rows["prompt_id"].tolist()
    assert len(rows) == NUM_STEPS * PROMPTS_PER_STEP * GROUP_SIZE
    assert rows["valid"].all()
    assert set(rows["finish_reason"]) <= {"stop", "length"}
    assert (rows["num_tokens"] >= 1).all()
    assert set(rows["reward"]) == {0.0, 1.0}


def assert_trained(metrics, engine):
    assert metrics["step"].tolist() == list(range(NUM_STEPS))
    assert metrics["policy/loss"].map(math.isfinite).all()
    assert (metrics["policy/grad_norm"] > 0).all()
    assert metrics["reward/mean"].between(0.02, 0.98).all()
    assert (metrics["rollout/failed_fraction"] == 0).all()
    assert (metrics["sampler/logprob_difference_mean"] < 1e-4).all()
    assert (metrics["sampler/logprob_difference_max"] < 1e-3).all()
    assert metrics["val/accuracy"].count() == 1  # after training
    if engine != "HFEngine":
        assert metrics["sampler/weight_check_difference"][0] < 1e-3
    if engine == "VLLMEngine":
        # The weights are checked at every other update.
        assert (metrics["sampler/weight_check_difference"][[0, 2]] < 1e-4).all()
