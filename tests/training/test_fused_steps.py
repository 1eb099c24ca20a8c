import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from lit_grpo.training.fused_steps import choose_fused


def weights(device: str = "cpu") -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, 6, device=device).view(2, 3))]


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_steps_are_fused_where_the_settings_leave_it_open(kind):
    groups = [{"params": weights()}, {"params": weights(), "lr": 0.1}]
    optimizer = choose_fused(kind(groups, lr=0.01))
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    assert optimizer.defaults["fused"]


class Own(AdamW):
    """A class of a user, whose step may be another one."""


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamW(weights(), fused=False),
        AdamW(weights(), foreach=True),
        AdamW(weights(), foreach=False),
        AdamW(weights(), differentiable=True),
        Own(weights()),
        SGD(weights(), lr=0.1),
    ],
    ids=["unfused", "foreach", "one by one", "differentiable", "own", "SGD"],
)
def test_any_other_optimizer_is_left_as_it_is(optimizer):
    before = [dict(group) for group in optimizer.param_groups]
    assert choose_fused(optimizer) is optimizer
    assert optimizer.param_groups == before


def test_on_the_meta_device_only_the_defaults_tell_that_steps_will_be_fused():
    optimizer = choose_fused(AdamW(weights("meta")))
    assert optimizer.defaults["fused"]
    assert optimizer.param_groups[0]["fused"] is None


def test_steps_are_those_of_torch_but_for_rounding():
    ours, plain = weights(), weights()
    optimizers = [
        choose_fused(AdamW(ours, lr=0.1, weight_decay=0.1)),
        AdamW(plain, lr=0.1, weight_decay=0.1, foreach=False),
    ]
    for number in range(5):
        for (parameter,), optimizer in zip((ours, plain), optimizers, strict=True):
            parameter.grad = torch.linspace(-1, 2, 6).view(2, 3) * (number - 1.5)
            optimizer.step()
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-6, atol=1e-6)
    assert not torch.equal(ours[0], weights()[0])
