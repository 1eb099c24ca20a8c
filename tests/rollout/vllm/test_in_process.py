"""Weights, checks and sleep of the in-process engine, with a stand-in for vLLM.

`test_in_process_with_vllm` has the same with a real vLLM.
"""

import copy
import shutil

import pytest
import torch
from served_engines import PLAIN, PROMPTS, assert_written_by, generate
from tiny import perturbed, tiny_policy

from lit_grpo.policy import LoRA
from lit_grpo.rollout import EngineFailed, VLLMEngine, WeightCheck
from lit_grpo.rollout.requests import Sample
from lit_grpo.types import UserError


class TransformersVLLM:
    """Has the interface of ``ColocatedVLLM``, and samples with a copy of the policy's model."""

    max_model_len = 128

    def __init__(self, policy) -> None:
        self.is_started = self.is_healthy = self.is_asleep = False
        self.num_loads = 0
        self.adapter_path = None
        self.is_stale = False
        self._policy, self._model = policy, None

    def start(self, *, sleeps, **arguments):
        self.arguments, self._sleeps = arguments, sleeps
        self.is_started = self.is_healthy = True

    def close(self):
        self.is_started = self.is_healthy = False

    def load_weights(self, weights):
        self.num_loads += 1
        list(weights)
        if not self.is_stale:
            self._model = copy.deepcopy(self._policy.model)

    def load_adapter(self, path):
        assert (path / "adapter_model.safetensors").exists()
        self.load_weights([])
        if self.adapter_path is not None:
            shutil.rmtree(self.adapter_path)
        self.adapter_path = path

    def wake_up(self):
        self.is_asleep = False

    def sleep(self, *, keeps_weights):
        if self._sleeps:
            self.is_asleep = True
            self._model = self._model if keeps_weights else None

    @torch.no_grad()
    def sample(self, requests, version, on_step):
        for number, request in enumerate(requests):
            for index, seed in request.seeds.items():
                on_step()
                yield number, index, self._sample(request, seed, version)

    def _sample(self, request, seed, version):
        ids, logprobs = list(request.token_ids), []
        noise = torch.Generator().manual_seed(seed)
        for _ in range(request.sampling.max_tokens):
            logits = self._model(torch.tensor([ids])).logits[0, -1]
            full = (logits / request.sampling.temperature).log_softmax(-1)
            ids.append(int(full.exp().multinomial(1, generator=noise)))
            logprobs.append(full[ids[-1]].item())
        new = ids[len(request.token_ids) :]
        return Sample(
            token_ids=new,
            logprobs=logprobs,
            versions=[str(version)] * len(new),
            finish_reason="length",
        )


def open_engine(policy, **settings) -> VLLMEngine:
    engine = VLLMEngine(weight_check=WeightCheck(every=1), **settings)
    engine._vllm = TransformersVLLM(policy)
    engine.start(policy)
    return engine


def test_new_weights_are_sampled_with_and_checked():
    policy = tiny_policy()
    engine = open_engine(policy)
    for version in (0, 7):
        engine.load_weights(perturbed(policy, seed=version), version)
        completions = generate(engine, PROMPTS, PLAIN)
        assert_written_by({version: policy.model}, PROMPTS, completions)
    differences = engine.observe().means["sampler/weight_check_difference"]
    assert len(differences) == 2
    assert max(differences) < 1e-4
    assert engine.observe().means["sampler/weight_check_difference"] == []


def test_weights_of_a_version_are_sent_once():
    policy = tiny_policy()
    engine = open_engine(policy, sleep=False)
    for _ in range(2):
        engine.load_weights(policy, 3)
    assert engine._vllm.num_loads == 1


def test_stale_weights_fail_the_engine():
    policy = tiny_policy()
    engine = open_engine(policy)
    engine.load_weights(policy, 0)
    engine._vllm.is_stale = True
    with pytest.raises(EngineFailed, match=r"vLLM in this process does not .* 0\.005 is allowed"):
        engine.load_weights(perturbed(policy), 1)
    assert not engine.health()


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["full", "adapter"])
def test_discarded_weights_are_sent_again_after_sleep(lora):
    policy = tiny_policy(lora=lora)
    engine = open_engine(policy)
    engine.load_weights(policy, 0)
    for _ in range(2):
        generate(engine, PROMPTS, PLAIN, group_size=1)
        assert engine._vllm.is_asleep
    assert engine._vllm.num_loads == (1 if lora else 2)


@pytest.mark.slow
def test_only_the_latest_adapter_stays_on_disk_until_the_end():
    policy = tiny_policy(lora=LoRA(rank=2))
    engine = open_engine(policy)
    assert engine._vllm.arguments["max_lora_rank"] == 8
    for version in (0, 1, 2):
        engine.load_weights(perturbed(policy, seed=version), version)
    scratch = engine._vllm.adapter_path.parent
    assert [path.name for path in scratch.glob("adapter-*")] == ["adapter-2"]
    engine.close()
    assert not scratch.exists()


@pytest.mark.parametrize("fraction", [0.0, 1.0, float("nan")])
def test_a_memory_fraction_that_leaves_nothing_to_either_is_refused(fraction):
    with pytest.raises(ValueError, match=r"Set model\.engine\.init_args\.memory_fraction"):
        VLLMEngine(memory_fraction=fraction)


def test_several_processes_are_refused_before_anything_is_loaded():
    VLLMEngine().check_processes(1, 1)
    with pytest.raises(UserError, match="single process and no process group, got a group of 2"):
        VLLMEngine().check_processes(2, 1)
