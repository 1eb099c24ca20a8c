"""What can be tested of in-process vLLM without one; `test_in_process_with_vllm` has the rest."""

import importlib.util

import pytest
from tiny import tiny_policy

from lit_grpo.rollout import VLLMEngine


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_message_says_how_to_get_it():
    engine = VLLMEngine()
    with pytest.raises(ValueError, match=r"lit-grpo\[vllm\].*VLLMServerEngine"):
        engine.start(tiny_policy())
    assert not engine.health()
    engine.close()
