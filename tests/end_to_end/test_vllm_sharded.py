"""A real vLLM server gets the weights of a policy that two real processes share."""

import pytest
from _checks import step_metrics
from engine_runs import command
from safetensors.torch import load_file
from vllm_environment import VLLM_PROGRAM, needs_vllm
from vllm_settings import ENV

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 2
SETTINGS = {
    "trainer.strategy": "fsdp2",
    "trainer.devices": 2,
    "trainer.max_steps": 2 * NUM_STEPS,
    "trainer.limit_val_batches": 0,
    "model.policy.lora": None,
    "model.update.minibatches": 2,
    "model.engine.init_args.weight_sync": "full",
    "model.engine.init_args.launch.program": VLLM_PROGRAM,
    "model.engine.init_args.weight_check.every": 1,
}


def test_a_server_samples_with_all_trained_weights_of_a_sharded_policy(importer, tmp_path):
    """The weights that the server has are compared with the policy's at every update."""
    words = command("fit", "debug", SETTINGS, engine="VLLMServerEngine")[3:]
    with importer.running(words, tmp_path, num_ranks=2, **ENV) as ranks:
        assert ranks.wait(600) == [0, 0], (tmp_path / "said0.txt").read_text()
    table = step_metrics(tmp_path / "run")
    assert len(table) == NUM_STEPS
    assert table["sampler/weight_check_difference"].notna().all()
    assert table["sampler/weight_check_difference"].max() < 1e-3
    assert table["policy/grad_norm"].min() > 0
    assert load_file(tmp_path / "run" / "final" / "model.safetensors")
