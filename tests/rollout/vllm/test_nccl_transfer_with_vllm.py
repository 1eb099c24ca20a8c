"""Weights sent to a real vLLM server by vLLM's own transfer, with `vllm_without_nccl` for NCCL.

The program `_transfer_checks` runs in vLLM's environment, and the tests here judge.
"""

import json

import pytest
from paths import SUPPORT
from vllm_environment import ROOT, needs_vllm
from vllm_runs import assert_same_logprobs, run

# The server is started twice.
pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("transfer")
    path = directory / "checks.json"
    run(SUPPORT / "_transfer_checks.py", path, directory / "engine", cwd=ROOT)
    return json.loads(path.read_text())


def assert_sampled_with(check, version: int) -> None:
    """By the engine's own check, and by the trainer's logprob of every token."""
    assert check["version"] == version
    assert {one for row in check["completions"] for one in row["policy_versions"]} == {version}
    (difference,) = check["differences"]
    assert difference < 1e-4
    assert_same_logprobs(check["completions"], check["trainer_logprobs"])


def test_full_weights_arrive_without_files(checks):
    assert_sampled_with(checks["first"], 0)
    # With the model that it was started with.
    assert checks["files"] == ["api_key", "model", "server_0.log"]


def test_further_weights_are_sent_over_the_same_group(checks):
    assert checks["first"]["groups_opened"] == 1
    assert_sampled_with(checks["second"], 1)
    assert checks["second"]["groups_opened"] == 0


def test_a_restarted_server_gets_the_last_weights_although_the_policy_has_changed(checks):
    assert checks["restarted"]["restarts"] == 1
    assert_sampled_with(checks["restarted"], 1)


@pytest.mark.parametrize(
    ("trouble", "version"), [("sender_failed", 2), ("server_failed", 3), ("sender_hung", 4)]
)
def test_a_transfer_interrupted_in_a_fused_layer_is_repeated(checks, trouble, version):
    assert_sampled_with(checks[trouble], version)
    assert checks[trouble]["groups_opened"] == 1
    assert checks[trouble]["restarts"] == 0


def test_a_replaced_group_is_used_for_further_weights(checks):
    assert_sampled_with(checks["at_last"], 5)
    assert checks["at_last"]["groups_opened"] == 0
