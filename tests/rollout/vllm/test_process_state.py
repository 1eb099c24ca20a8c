import os
import sys

import torch

from lit_grpo.rollout.vllm.process_state import IsolatedProcessState


def test_each_side_finds_the_state_that_it_left(monkeypatch):
    monkeypatch.setenv("LIT_GRPO_TEST", "outside")
    hook = sys.excepthook
    isolated = IsolatedProcessState({"LIT_GRPO_TEST": "inside"})
    torch.manual_seed(1)
    with isolated:
        torch.manual_seed(2)
        sys.excepthook = print
        assert os.environ["LIT_GRPO_TEST"] == "inside"
        os.environ["LIT_GRPO_TEST"] = "left"
    outside = torch.rand(3)
    assert sys.excepthook is hook
    assert os.environ["LIT_GRPO_TEST"] == "outside"
    with isolated:
        assert sys.excepthook is print
        assert os.environ["LIT_GRPO_TEST"] == "left"
        inside = torch.rand(3)
    assert torch.equal(outside, torch.rand(3, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(inside, torch.rand(3, generator=torch.Generator().manual_seed(2)))


def test_autocast_and_the_default_device_of_the_trainer_do_not_apply_within():
    isolated, weight = IsolatedProcessState({}), torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        for _ in range(2):
            with isolated:
                assert torch.ones(2).device.type == "cpu"
                assert (weight @ weight).dtype == torch.float32
            assert torch.ones(2).device.type == "meta"
            assert (weight @ weight).dtype == torch.bfloat16
    with isolated:
        assert torch.ones(2).device.type == "cpu"
