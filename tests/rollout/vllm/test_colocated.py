"""What can be tested of in-process vLLM without one; `test_in_process_with_vllm` has the rest."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny import tiny_policy

from lit_grpo.rollout import Sampling, VLLMEngine
from lit_grpo.rollout.requests import Request
from lit_grpo.rollout.vllm.colocated import ColocatedVLLM


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_message_says_how_to_get_it():
    engine = VLLMEngine()
    with pytest.raises(ValueError, match=r"lit-grpo\[vllm\].*VLLMServerEngine"):
        engine.start(tiny_policy())
    assert not engine.health()
    engine.close()


def test_the_trainer_frees_what_its_allocator_keeps_before_vllm_takes_memory(monkeypatch):
    calls: list[str] = []

    class SleepingVLLM:
        def wake_up(self):
            calls.append("wake up")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty cache"))
    vllm = ColocatedVLLM(env={})
    vllm._llm, vllm.is_asleep = SleepingVLLM(), True
    vllm.wake_up()
    assert calls == ["empty cache", "wake up"]
    assert not vllm.is_asleep


class ComputingVLLM:
    """In place of ``vllm.LLM``: it ends each request with one token, and says how it computes."""

    def __init__(self, **_):
        self.computed = []
        self.names = []
        self.llm_engine = self
        self.compute("start")

    def compute(self, what):
        made = torch.ones(1, 1)
        product = torch.ones(1, 1, device="cpu") @ torch.ones(1, 1, device="cpu")
        self.computed.append((what, made.device.type, product.dtype))

    def add_request(self, name, *_, **__):
        self.compute("add")
        self.names.append(name)

    def step(self):
        self.compute("step")
        choice = SimpleNamespace(
            token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-1.0)}], finish_reason="stop"
        )
        return [SimpleNamespace(request_id=self.names.pop(), outputs=[choice], finished=True)]


def install(monkeypatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_neither_autocast_nor_the_default_device_of_the_trainer_reaches_vllm(monkeypatch):
    platform = SimpleNamespace(is_sleep_mode_available=lambda: False)
    kinds = SimpleNamespace(CUMULATIVE="cumulative")
    install(monkeypatch, "vllm", LLM=ComputingVLLM, SamplingParams=SimpleNamespace)
    install(monkeypatch, "vllm.platforms", current_platform=platform)
    install(monkeypatch, "vllm.exceptions", VLLMClientError=ValueError)
    install(monkeypatch, "vllm.sampling_params", RequestOutputKind=kinds)
    request = Request(
        token_ids=(1, 2), sampling=Sampling(max_tokens=4), stop_token_ids=(), seeds={0: 1, 1: 2}
    )
    vllm = ColocatedVLLM(env={})
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        vllm.start(sleeps=False)
        samples = [sample for _, _, sample in vllm.sample([request], 3, lambda: None)]
        assert torch.ones(1).device.type == "meta"
        assert torch.is_autocast_enabled("cpu")
    assert [(one.token_ids, one.versions) for one in samples] == [([7], ["3"])] * 2
    assert vllm._llm.computed == [
        (what, "cpu", torch.float32) for what in ("start", "add", "add", "step", "step")
    ]
