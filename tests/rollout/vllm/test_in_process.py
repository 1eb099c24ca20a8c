"""vLLM within the trainer's process: a real one, in a child that runs `_vllm_checks`."""

import csv
import importlib.util
import json
import os
import sys

import pytest
import torch
from paths import SUPPORT
from tiny import prompt, tiny_policy
from vllm_environment import FLAGS, MAX_MODEL_LEN, ROOT, launch_on_cpu, needs_vllm
from vllm_runs import assert_same_logprobs, run
from vllm_settings import ARCHITECTURE

from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rollout import Sampling, VLLMEngine, VLLMServerEngine
from lit_grpo.rollout.vllm.process_state import IsolatedProcessState
from lit_grpo.rollout.vllm.sampling import adapter_room

pytestmark = pytest.mark.timeout(600)  # vLLM starts several times, on a busy machine perhaps

PROMPTS = ["12+34=", "a longer prompt", "x"]


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    path = tmp_path_factory.mktemp("vllm") / "checks.json"
    run(SUPPORT / "_vllm_checks.py", path, cwd=ROOT)
    return json.loads(path.read_text())


def tokens(completions):
    return [completion["token_ids"] for completion in completions]


# Sampling


@needs_vllm
def test_greedy_completions_are_those_of_transformers_generate(checks):
    sampling = checks["sampling"]
    assert tokens(sampling["greedy"]) == sampling["greedy_by_transformers"]
    assert_same_logprobs(sampling["greedy"], sampling["greedy_trainer_logprobs"])


@needs_vllm
def test_logprobs_at_a_temperature_are_the_trainers(checks):
    sampled = checks["sampling"]["temperature_0.7"]
    assert_same_logprobs(sampled["completions"], sampled["trainer_logprobs"])


@needs_vllm
def test_raw_logprobs_beside_top_p_and_top_k_are_the_trainers(checks):
    sampled = checks["raw"]["top_p"]
    assert_same_logprobs(sampled["completions"], sampled["trainer_logprobs"])


@needs_vllm
def test_what_vllm_would_report_wrong_logprobs_of_is_refused(checks):
    top_p, temperature = checks["sampling"]["top_p"], checks["raw"]["other_temperature"]
    assert "Set model.sampling.top_p to 1" in top_p["message"]
    assert "Set model.engine.init_args.logprobs_mode" in temperature["message"]


@needs_vllm
def test_the_seed_decides_and_rows_of_a_group_differ(checks):
    first, again, other = checks["sampling"]["seeds"]
    assert first == again
    assert tokens(first) != tokens(other)
    assert len(set(map(tuple, tokens(first)))) == len(first)


@needs_vllm
def test_completions_say_which_policy_version_wrote_them(checks):
    for completion in checks["sampling"]["full"]:
        assert completion["policy_versions"] == [3] * len(completion["token_ids"])
    for completion in checks["full"]["new_version"]["completions"]:
        assert completion["policy_versions"] == [7] * len(completion["token_ids"])


@needs_vllm
def test_a_stop_token_ends_a_completion_and_stays_in_it(checks):
    sampling = checks["sampling"]
    stop, ended = sampling["stop_token"], 0
    for before, after in zip(sampling["full"], sampling["stopped_by_token"], strict=True):
        if stop in before["token_ids"]:
            end = before["token_ids"].index(stop) + 1
            assert after["token_ids"] == before["token_ids"][:end]
            assert after["finish_reason"] == "stop"
            ended += 1
        else:
            assert after["token_ids"] == before["token_ids"]
    assert ended


@needs_vllm
def test_a_stop_string_cuts_the_text_but_not_the_tokens(checks):
    sampling, tokenizer = checks["sampling"], byte_tokenizer()
    stop, ended = sampling["stop_string"], 0
    for completion in sampling["stopped_by_string"]:
        decoded = tokenizer.decode(completion["token_ids"], skip_special_tokens=True)
        assert stop not in completion["text"]
        if stop in decoded:
            assert decoded.endswith(stop)
            assert completion["text"] == decoded[: -len(stop)]
            assert completion["finish_reason"] == "stop"
            ended += 1
    assert ended


@needs_vllm
def test_no_completion_is_shorter_than_min_tokens(checks):
    for completion in checks["sampling"]["min_tokens"]:
        assert len(completion["token_ids"]) >= 5
        assert min(completion["token_ids"][:4]) >= 250  # all below would have ended it


@needs_vllm
def test_a_prompt_that_vllm_refuses_is_a_failed_row_beside_sampled_ones(checks):
    rows = checks["sampling"]["with_one_too_long"]
    assert [row["finish_reason"] for row in rows] == ["failed"] * 3 + ["length"] * 3
    assert str(MAX_MODEL_LEN) in rows[0]["failure"]


@needs_vllm
def test_completions_come_while_others_still_run_and_closing_ends_those(checks):
    breaking_off = checks["breaking_off"]
    assert breaking_off["first"] == {"row": 0, "num_tokens": 1}
    assert breaking_off["was_running"]
    assert not breaking_off["is_running"]
    assert breaking_off["next_is_the_same"]


@needs_vllm
def test_the_same_seed_draws_the_same_from_a_server(checks, tmp_path):
    policy = tiny_policy(architecture=ARCHITECTURE)
    engine = VLLMServerEngine(launch=launch_on_cpu(), directory=str(tmp_path))
    engine.start(policy)
    try:
        engine.load_weights(policy, 3)
        prompts = [prompt(text, id=text) for text in PROMPTS]
        rows = dict(engine.generate(prompts, 3, Sampling(max_tokens=12), seed=0))
    finally:
        engine.close()
    assert [list(rows[n].token_ids) for n in range(9)] == tokens(checks["sampling"]["full"])


# Weights


@needs_vllm
def test_new_weights_arrive_and_are_proven(checks):
    full = checks["full"]
    assert_same_logprobs(
        full["new_version"]["completions"], full["new_version"]["trainer_logprobs"]
    )
    assert len(full["proof"]) == 2
    assert max(full["proof"]) < 1e-4
    assert full["health"]


@needs_vllm
def test_weights_of_a_version_are_sent_once(checks):
    assert checks["full"]["same_version"]


@needs_vllm
@pytest.mark.parametrize("way", ["adapter", "merged"])
def test_an_adapter_is_sampled_with_and_proven_either_way(checks, way):
    sampled = checks[way]["sampled"]
    assert_same_logprobs(sampled["completions"], sampled["trainer_logprobs"])
    assert len(checks[way]["proofs"]) == 3
    assert max(checks[way]["proofs"]) < 1e-4


@needs_vllm
def test_only_the_newest_adapter_stays_loaded_and_on_disk(checks):
    assert checks["adapter"]["loaded"] == [[1], [2], [3]]
    assert checks["adapter"]["directories"] == ["adapter-2"]
    assert checks["adapter"]["is_scratch_gone"]


@needs_vllm
def test_a_tied_head_that_stays_stale_is_found_out_at_the_first_change(checks):
    tied = checks["tied"]
    assert max(tied["proofs_before"]) < 1e-4  # at the first update old and new are the same
    assert tied["failure"]["type"] == "EngineFailed"
    assert "differ from the trainer's by 0." in tied["failure"]["message"]
    assert "where 0.005 is allowed" in tied["failure"]["message"]


@needs_vllm
def test_a_prefix_cache_that_outlives_an_update_is_found_out(checks):
    skipped = checks["skipped_reset"]
    assert skipped["failure"]["type"] == "EngineFailed"
    assert "where 0.005 is allowed" in skipped["failure"]["message"]
    assert not skipped["health"]


# The process around it


@needs_vllm
def test_a_trainings_random_numbers_are_those_without_an_engine(checks):
    process = checks["process"]
    assert process["disturbed"] == process["undisturbed"]


@needs_vllm
def test_the_process_keeps_its_environment_hooks_threads_and_groups(checks):
    process = checks["process"]
    assert not process["before"]["has_process_group"]
    assert process["after"] == [process["before"]] * 3
    assert checks["shared_state_at_the_end"] == process["before"]


@needs_vllm
def test_memory_is_given_back_between_generations_and_weights_come_again(checks):
    """On a CPU vLLM goes through the motions and keeps its memory."""
    for level, asleep in checks["asleep"].items():
        assert asleep["was_asleep"] == [True] * 4, level
        assert asleep["is_repeated"], level
        assert asleep["weights_sent"] == (2 if level == "adapter" else 4), level
        assert max(asleep["proofs"]) < 1e-4, level


@needs_vllm
def test_no_process_is_left_behind(checks):
    assert checks["children"] == []


@needs_vllm
def test_a_process_group_is_refused_with_the_engine_that_ranks_can_share(checks):
    assert checks["process_group"]["type"] == "ValueError"
    assert "Set trainer.devices to 1" in checks["process_group"]["message"]
    assert "VLLMServerEngine" in checks["process_group"]["message"]


def test_the_inside_of_an_aside_finds_again_what_it_left(monkeypatch):
    monkeypatch.setenv("LIT_GRPO_TEST", "outside")
    hook = sys.excepthook
    aside = IsolatedProcessState({"LIT_GRPO_TEST": "inside"})
    torch.manual_seed(1)
    with aside:
        torch.manual_seed(2)
        sys.excepthook = print
        assert os.environ["LIT_GRPO_TEST"] == "inside"
        os.environ["LIT_GRPO_TEST"] = "left"
    outside = torch.rand(3)
    assert sys.excepthook is hook
    assert os.environ["LIT_GRPO_TEST"] == "outside"
    with aside:
        assert sys.excepthook is print
        assert os.environ["LIT_GRPO_TEST"] == "left"
        inside = torch.rand(3)
    assert torch.equal(outside, torch.rand(3, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(inside, torch.rand(3, generator=torch.Generator().manual_seed(2)))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_message_says_how_to_get_it():
    engine = VLLMEngine()
    with pytest.raises(ValueError, match="pip install vllm.*VLLMServerEngine"):
        engine.start(tiny_policy())
    assert not engine.health()
    engine.close()


def test_a_fraction_of_memory_that_leaves_none_is_refused():
    with pytest.raises(ValueError, match=r"Set model\.engine\.init_args\.memory_fraction"):
        VLLMEngine(memory_fraction=1.0)


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (8, 8), (64, 64), (400, 512)])
def test_an_adapter_gets_the_least_room_that_vllm_has_for_it(rank, room):
    assert adapter_room(rank) == room


def test_an_adapter_without_room_is_refused():
    with pytest.raises(ValueError, match=r"Set model\.policy\.lora\.rank"):
        adapter_room(1024)


# A training


REWARD = """
from lit_grpo.rewards import Reward

class LowBytes(Reward):
    def score(self, prompt, completion):
        return sum(token < 128 for token in completion.token_ids) / len(completion.token_ids)
"""


@needs_vllm
@pytest.mark.slow
def test_a_training_samples_every_step_with_the_weights_of_the_step_before(tmp_path):
    (tmp_path / "low_bytes.py").write_text(REWARD)
    settings = {
        "model.policy.path": None,
        "model.policy.architecture": ARCHITECTURE,
        "model.rewards": [{"class_path": "low_bytes.LowBytes"}],
        "model.engine": "lit_grpo.rollout.vllm.in_process.VLLMEngine",
        "model.engine.init_args.max_model_len": MAX_MODEL_LEN,
        "model.engine.init_args.flags": FLAGS,
        "model.engine.init_args.proof.every": 2,
        "data.init_args.prompts_per_step": 8,
        "data.init_args.validation_size": 8,
        "trainer.accelerator": "cpu",
        "trainer.max_steps": 3,
        "trainer.val_check_interval": 3,
    }
    options = [
        f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in settings.items()
    ]
    run(
        "-m",
        "lit_grpo",
        "fit",
        "--config",
        "quickstart",
        "--run_dir",
        "run",
        *options,
        cwd=tmp_path,
    )
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    assert len(rows) == 3
    for row in rows:
        assert float(row["sampler/logprob_difference_max"]) < 1e-3
        assert float(row["policy/grad_norm"]) > 0
    proofs = [float(row["sampler/proof_difference"]) for row in rows]
    assert proofs[0] < 1e-4
    assert proofs[2] < 1e-4
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
