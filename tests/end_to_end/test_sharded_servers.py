"""Servers get the weights of a policy that two real processes share, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from _checks import step_metrics
from engine_runs import command
from forked_ranks import Importer
from needs import needs_deepspeed
from safetensors.torch import load_file
from served_engines import PROGRAM, SEEDED
from sglang_server import running_server
from tiny import tiny_policy

pytestmark = pytest.mark.slow

Weights = dict[str, torch.Tensor]

WHOLE = {"weight_sync": "full"}
ALL_WEIGHTS = {"model.policy.lora": None}
"""No adapter, which a server would get merged into weights that are not trained."""
ADAPTER = {"weight_sync": "adapter", "launch": {"program": PROGRAM, "dtype": "float32"}}
SAVED_STEP = 2
SAVING = {
    "trainer.callbacks": [{"class_path": "Checkpoints", "init_args": {"every_n_steps": SAVED_STEP}}]
}
"""A checkpoint before the last step, too."""
RESUMED = ("fsdp2", "deepspeed_stage_3")
"""Strategies whose runs are resumed from it."""
AHEAD = {"model.policy.lora.rank": 4, "model.max_head_offpolicyness": 2}
"""A smaller adapter, and rollouts that are sampled ahead."""


def train(
    importer: Importer,
    directory: Path,
    strategy: str,
    engine: Mapping[str, Any],
    others: Mapping[str, Any],
    *,
    num_steps: int = 3,
) -> Weights:
    """Return the final model of a run that compares servers with the policy at every update.

    Args:
        num_steps: How many rollout steps it takes; fewer than 3 if it resumes.
    """
    settings = {
        "trainer.strategy": strategy,
        "trainer.devices": 2,
        "trainer.max_steps": 6,
        "trainer.val_check_interval": 99,
        "trainer.limit_val_batches": 0,
        "model.sampling.max_tokens": 6,
        "model.engine": {
            "class_path": "SGLangEngine",
            "init_args": {**engine, "weight_check": {"every": 1}},
        },
    }
    words = command("fit", "debug", settings | others)[3:]
    with importer.running(words, directory, num_ranks=2) as ranks:
        assert ranks.wait() == [0, 0], (directory / "said0.txt").read_text()
    table = step_metrics(directory / "run")
    assert len(table) == num_steps
    assert table["sampler/weight_check_difference"].notna().sum() >= min(num_steps, 2)
    assert table["sampler/weight_check_difference"].max() < 1e-3
    return load_file(directory / "run" / "final" / "model.safetensors")


def resume(
    importer: Importer, directory: Path, strategy: str, engine: Mapping[str, Any]
) -> Weights:
    """Return the final model of a run that takes the last step of another one again."""
    saved = directory / "run" / "checkpoints" / f"step_{SAVED_STEP:06d}.ckpt"
    assert saved.is_dir()
    (later := directory / "resumed").mkdir()
    others = ALL_WEIGHTS | {"ckpt_path": str(saved)}
    return train(importer, later, strategy, engine, others, num_steps=1)


def assert_close(found: Weights, expected: Weights) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def attached(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """Return the settings for a running server, which begins with other weights."""
    config = yaml.safe_load((files("lit_grpo.configs") / "debug.yaml").read_text())
    directory = tmp_path_factory.mktemp("served")
    policy = tiny_policy(architecture=config["model"]["policy"]["architecture"], seed=7)
    policy.save_pretrained(directory)
    with running_server(directory, **SEEDED) as server:
        yield {"urls": [server.url], **WHOLE}


@pytest.fixture(scope="module")
def with_attached(importer, tmp_path_factory, attached) -> Weights:
    """Return the final model of a run under DDP."""
    directory = tmp_path_factory.mktemp("ddp")
    weights = train(importer, directory, "ddp", attached, ALL_WEIGHTS)
    trained = torch.load(directory / "run" / "checkpoints" / "last.ckpt")["state_dict"]
    assert not any("lora" in name for name in trained)
    return weights


@pytest.fixture(scope="module")
def with_launched(importer, tmp_path_factory) -> Weights:
    """Return the final model of a run under DDP."""
    return train(importer, tmp_path_factory.mktemp("ddp"), "ddp", ADAPTER, AHEAD)


def sharded(*strategies: str) -> list[Any]:
    return [
        pytest.param(name, marks=needs_deepspeed if "deepspeed" in name else ())
        for name in strategies
    ]


@pytest.mark.parametrize(
    "strategy", sharded("fsdp2", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
)
def test_an_attached_server_gets_all_trained_weights_of_a_sharded_policy(
    strategy, attached, with_attached, importer, tmp_path
):
    """And it does once the run is resumed, which ends bit-identically."""
    whole = train(importer, tmp_path, strategy, attached, ALL_WEIGHTS | SAVING)
    assert_close(whole, with_attached)
    if strategy in RESUMED:
        resumed = resume(importer, tmp_path, strategy, attached)
        assert resumed.keys() == whole.keys()
        assert all(resumed[name].equal(weight) for name, weight in whole.items())


@pytest.mark.parametrize("strategy", sharded("fsdp2", "deepspeed_stage_3"))
def test_a_launched_server_gets_the_adapter_of_a_sharded_policy_that_samples_ahead(
    strategy, with_launched, importer, tmp_path
):
    assert_close(train(importer, tmp_path, strategy, ADAPTER, AHEAD), with_launched)
