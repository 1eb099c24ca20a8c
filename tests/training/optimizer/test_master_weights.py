"""The steps of float32 masters against those of AdamW on a float32 model, and what runs keep."""

from __future__ import annotations

import copy

import pytest
import torch
from needs import needs_bitsandbytes, needs_torchao
from small_runs import fit, make_module, weights
from torch.optim import AdamW

from lit_grpo.callbacks import Checkpoints
from lit_grpo.objective import KLTerm, Objective
from lit_grpo.policy import LoRA
from lit_grpo.training import MasterAdamW
from lit_grpo.training.optimizer import master_weights

SETTINGS = {"lr": 1e-6, "betas": (0.9, 0.95), "weight_decay": 0.1}
BF16 = {"dtype": "bfloat16"}


def bf16_weights() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(64, 48), (48,), (1000,)]
    return [torch.nn.Parameter(torch.randn(one).mul(0.02).bfloat16()) for one in shapes]


def take_steps(optimizer, parameters, number=10, start=0) -> None:
    """Take steps on the same gradients, which are numbers of bfloat16, for every optimizer."""
    for step in range(start, start + number):
        generator = torch.Generator().manual_seed(step)
        for one in parameters:
            gradient = torch.randn(one.shape, generator=generator).bfloat16()
            one.grad = gradient.to(one.dtype)
        optimizer.step()


def masters_of(optimizer, parameters) -> list[torch.Tensor]:
    return [optimizer.state[one]["master"] for one in parameters]


def share_moved(before, after) -> float:
    moved = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return moved / sum(one.numel() for one in before)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("max_values", [100, 2**26])
def test_masters_take_the_steps_of_adamw_on_a_float32_model(monkeypatch, fused, max_values):
    monkeypatch.setattr(master_weights, "MAX_VALUES", max_values)
    own = bf16_weights()
    others = [torch.nn.Parameter(one.detach().float()) for one in own]
    optimizer = MasterAdamW(own, fused=fused, **SETTINGS)
    take_steps(optimizer, own)
    take_steps(AdamW(others, fused=fused, **SETTINGS), others)
    for weight, master, other in zip(own, masters_of(optimizer, own), others, strict=True):
        assert torch.equal(master, other)
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, other.bfloat16())


def test_float32_weights_take_the_steps_of_adamw_without_masters():
    own = [torch.nn.Parameter(one.detach().float()) for one in bf16_weights()]
    others = copy.deepcopy(own)
    optimizer = MasterAdamW(own, **SETTINGS)
    take_steps(optimizer, own)
    take_steps(AdamW(others, **SETTINGS), others)
    assert all(map(torch.equal, own, others))
    assert all("master" not in state for state in optimizer.state.values())


def test_small_steps_move_the_masters_where_adamw_moves_few_weights():
    start = [one.detach().clone() for one in bf16_weights()]
    plain, own = bf16_weights(), bf16_weights()
    settings = {"lr": 1e-6, "weight_decay": 0.0}
    take_steps(AdamW(plain, **settings), plain, number=1)
    optimizer = MasterAdamW(own, **settings)
    take_steps(optimizer, own, number=1)
    assert share_moved(start, plain) < 0.05
    assert share_moved([one.float() for one in start], masters_of(optimizer, own)) > 0.99


@pytest.mark.parametrize("fused", [None, True])
def test_steps_after_loading_a_state_are_those_without_it(tmp_path, fused):
    whole, parted = bf16_weights(), bf16_weights()
    settings = SETTINGS | {"fused": fused}
    optimizer = MasterAdamW(whole, **settings)
    take_steps(optimizer, whole, number=6)
    earlier = MasterAdamW(parted, **settings)
    take_steps(earlier, parted, number=3)
    torch.save(earlier.state_dict(), tmp_path / "state.pt")
    resumed = MasterAdamW(parted, lr=1.0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    take_steps(resumed, parted, number=3, start=3)
    assert all(map(torch.equal, whole, parted))
    assert all(map(torch.equal, masters_of(optimizer, whole), masters_of(resumed, parted)))


def test_the_moments_of_adamw_on_a_float32_model_can_be_taken_over():
    own = bf16_weights()
    others = [torch.nn.Parameter(one.detach().float()) for one in own]
    before = AdamW(others, **SETTINGS)
    take_steps(before, others, number=3)
    with torch.no_grad():
        for weight, other in zip(own, others, strict=True):
            weight.copy_(other)
            other.copy_(weight)  # a checkpoint of float32 weights is rounded when it is loaded
    after = MasterAdamW(own, **SETTINGS)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    take_steps(after, own, number=3, start=3)
    take_steps(before, others, number=3, start=3)
    assert all(map(torch.equal, masters_of(after, own), others))


def test_weights_without_a_gradient_stay_and_have_no_state():
    own = bf16_weights()
    start = own[1].detach().clone()
    optimizer = MasterAdamW(own, lr=1.0)
    own[0].grad = torch.ones_like(own[0])
    optimizer.step()
    assert torch.equal(own[1], start)
    assert set(optimizer.state) == {own[0]}


@pytest.mark.parametrize(
    "settings", [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -1.0}, {"betas": (0.9, 1.0)}]
)
def test_settings_out_of_range_are_named(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"optimizer.init_args.{name}"):
        MasterAdamW(bf16_weights(), **settings)


def run_of(optimizer, **settings):
    return make_module(
        policy=BF16 | settings.pop("policy", {}),
        optimizer=optimizer,
        update={"max_grad_norm": 0.1},
        objective=Objective(kl=KLTerm(coef=0.1)),
        **settings,
    )


def masters(parameters):
    return MasterAdamW(parameters, lr=1e-3)


def torchao_rounding_at_random(parameters):
    from torchao.optim import _AdamW

    return _AdamW(parameters, lr=1e-3, bf16_stochastic_round=True)


def torchao_in_8_bits(parameters):
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-3, block_size=64, bf16_stochastic_round=True)


def of_bitsandbytes(parameters):
    """Make the 8-bit optimizer for float32 weights: it rounds to the nearest."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-3, min_8bit_size=64)


OF_TORCHAO = [
    pytest.param(one, marks=[pytest.mark.slow, needs_torchao])
    for one in (torchao_rounding_at_random, torchao_in_8_bits)
]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [masters, *OF_TORCHAO])
def test_a_run_of_bfloat16_weights_resumes_bit_identically(tmp_path, optimizer, caplog):
    whole = run_of(optimizer)
    fit(whole, max_steps=4)
    saving = Checkpoints(dirpath=str(tmp_path))
    fit(run_of(optimizer), callbacks=[saving], max_steps=2)
    resumed = run_of(optimizer)
    fit(resumed, callbacks=[saving], max_steps=4, ckpt_path=str(tmp_path / "last.ckpt"))
    assert {one.dtype for one in weights(resumed).values()} == {torch.bfloat16}
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[name]), name
    assert not any("trains bfloat16 weights" in line for line in caplog.messages)


@pytest.mark.slow
@needs_bitsandbytes
def test_a_run_with_8_bit_moments_of_bitsandbytes_resumes_bit_identically(tmp_path):
    def module():
        return make_module(optimizer=of_bitsandbytes, update={"max_grad_norm": 0.1})

    fit(whole := module(), max_steps=4)
    moments = [one["state1"].dtype for one in whole.optimizers().state.values()]
    assert torch.uint8 in moments
    saving = Checkpoints(dirpath=str(tmp_path))
    fit(module(), callbacks=[saving], max_steps=2)
    resumed = module()
    fit(resumed, callbacks=[saving], max_steps=4, ckpt_path=str(tmp_path / "last.ckpt"))
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[name]), name


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_adamw_on_trained_bfloat16_weights_is_named_with_what_to_set(lora, caplog):
    fit(run_of(lambda params: AdamW(params, lr=1e-6), policy={"lora": lora}))
    lines = [line for line in caplog.messages if "trains bfloat16 weights" in line]
    assert len(lines) == (lora is None)
    for line in lines:
        assert line.startswith("AdamW trains bfloat16 weights")
        assert "Set model.optimizer to MasterAdamW" in line
