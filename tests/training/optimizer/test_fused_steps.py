from functools import partial

import pytest
import torch
from forked import run_in_processes
from small_runs import fit, make_module
from small_runs import weights as steps_weights
from torch.optim import SGD, Adam, AdamW

from lit_grpo.callbacks import Checkpoints
from lit_grpo.training import base
from lit_grpo.training.optimizer.fused_steps import choose_fused, place_counts


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


def adamw_run():
    return make_module(optimizer=partial(AdamW, lr=0.01))


def test_a_checkpoint_of_steps_that_were_not_fused_goes_on_with_fused_ones(tmp_path, monkeypatch):
    whole, saving = adamw_run(), Checkpoints(dirpath=str(tmp_path))
    with monkeypatch.context() as before:
        before.setattr(base, "choose_fused", lambda optimizer: optimizer)
        fit(whole, max_steps=4)
        fit(adamw_run(), callbacks=[saving], max_steps=2)
    checkpoint = str(tmp_path / "last.ckpt")
    (saved,) = torch.load(checkpoint, weights_only=False)["optimizer_states"]
    assert saved["param_groups"][0]["fused"] is None
    resumed = adamw_run()
    fit(resumed, max_steps=4, ckpt_path=checkpoint)
    optimizer = resumed.trainer.optimizers[0]
    assert optimizer.param_groups[0]["fused"]
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}
    for name, weight in steps_weights(whole).items():
        torch.testing.assert_close(
            steps_weights(resumed)[name], weight, rtol=1e-5, atol=1e-6, msg=name
        )


def test_a_config_that_says_how_steps_are_taken_is_followed_from_the_first_step():
    module = make_module(optimizer=partial(AdamW, lr=0.01, foreach=True))
    fit(module, max_steps=1)
    (group,) = module.trainer.optimizers[0].param_groups
    assert (group["fused"], group["foreach"]) == (None, True)


def devices_of_counts() -> list[str]:
    from pretend_device import DEVICE, pretend_device

    with pretend_device():
        parameter = torch.nn.Parameter(torch.ones(2, device=DEVICE))
        optimizer = AdamW([parameter], lr=0.1)
        optimizer.state[parameter] = {"step": torch.tensor(3.0)}
        found = []
        for fused in (None, True, False):
            optimizer.param_groups[0]["fused"] = fused
            place_counts(optimizer)
            found.append(str(optimizer.state[parameter]["step"].device))
    return found


def test_the_count_of_steps_is_on_the_device_of_the_weights_if_fused_steps_read_it():
    assert run_in_processes(devices_of_counts) == [["cpu", "pretend:0", "cpu"]]


def test_counts_of_other_optimizers_stay_where_they_are():
    (parameter,) = weights("meta")
    optimizer = SGD([parameter], lr=0.1)
    del optimizer.param_groups[0]["fused"]
    optimizer.state[parameter] = {"step": torch.tensor(3.0, device="meta")}
    place_counts(optimizer)
    assert optimizer.state[parameter]["step"].device.type == "meta"
