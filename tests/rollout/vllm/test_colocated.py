"""What can be tested of in-process vLLM without one; `test_in_process_with_vllm` has the rest."""

import importlib.util

import pytest
import torch
from tiny import tiny_policy

from lit_grpo.rollout import VLLMEngine
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
