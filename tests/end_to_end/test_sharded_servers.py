"""Servers get the weights of a policy that two real processes share, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from engine_runs import command
from forked_ranks import Importer
from needs import needs_deepspeed
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

Weights = dict[str, torch.Tensor]

SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"model.engine.init_args.weight_sync": "full"},
    "adapter": {
        "model.engine.init_args.weight_sync": "adapter",
        "model.policy.lora.rank": 4,
        "model.max_head_offpolicyness": 2,
    },
}
"""Which weights are sent -> the settings; those of the adapter while rollouts are sampled ahead."""


def train(importer: Importer, directory: Path, strategy: str, sent: str) -> Weights:
    """Return the final model of a run that compares servers with the policy at every update."""
    settings = {
        "trainer.strategy": strategy,
        "trainer.devices": 2,
        "trainer.max_steps": 6,
        "trainer.val_check_interval": 99,
        "trainer.limit_val_batches": 0,
        "model.engine.init_args.proof.every": 1,
    }
    words = command("fit", "debug", settings | SETTINGS[sent], engine="SGLangEngine")[3:]
    with importer.running(words, directory, num_ranks=2) as ranks:
        assert ranks.wait() == [0, 0], (directory / "said0.txt").read_text()
    table = pd.read_csv(directory / "run" / "metrics.csv")
    assert len(table) == 3
    assert table["sampler/proof_difference"].notna().sum() >= 2
    assert table["sampler/proof_difference"].max() < 1e-3
    return load_file(directory / "run" / "final" / "model.safetensors")


@pytest.fixture(scope="module", params=SETTINGS)
def under_ddp(request, importer, tmp_path_factory) -> tuple[str, Weights]:
    """Return what servers get, and the final model of a run under DDP."""
    directory = tmp_path_factory.mktemp("ddp")
    return request.param, train(importer, directory, "ddp", request.param)


@pytest.mark.parametrize(
    "strategy", ["fsdp2", pytest.param("deepspeed_stage_3", marks=needs_deepspeed)]
)
def test_a_server_gets_the_weights_of_a_sharded_policy(under_ddp, strategy, importer, tmp_path):
    sent, expected = under_ddp
    found = train(importer, tmp_path, strategy, sent)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)
