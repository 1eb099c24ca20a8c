import pytest
from tiny import tiny_policy

from lit_grpo.policy import LoRA
from lit_grpo.rollout.weights.sync import sends_adapter
from lit_grpo.types import UserError

ADAPTER = LoRA(rank=2)
WITH_HEAD = LoRA(rank=2, modules_to_save=["lm_head"])


@pytest.mark.parametrize(
    ("lora", "weight_sync", "is_adapter"),
    [
        (None, "auto", False),
        (None, "full", False),
        (ADAPTER, "auto", True),
        (ADAPTER, "adapter", True),
        (ADAPTER, "full", False),
        (WITH_HEAD, "auto", False),
        (WITH_HEAD, "full", False),
    ],
)
def test_an_adapter_is_sent_alone_if_nothing_else_is_trained_and_the_user_agrees(
    lora, weight_sync, is_adapter
):
    assert sends_adapter(tiny_policy(lora=lora).model, weight_sync) is is_adapter


@pytest.mark.parametrize("lora", [None, WITH_HEAD])
def test_an_adapter_cannot_be_sent_alone_if_other_weights_are_trained(lora):
    with pytest.raises(UserError, match="needs model.policy.lora without modules_to_save"):
        sends_adapter(tiny_policy(lora=lora).model, "adapter")
