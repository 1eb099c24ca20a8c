"""What an engine gets of a whole run; `tests/end_to_end/test_sharded.py` has real engines."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lit_grpo.distributed.deepspeed_checkpoints import WholeTraining
from lit_grpo.distributed.deepspeed_resume import load_training, trained_names
from lit_grpo.types import UserError


class Model(nn.Module):
    """Two trained weights, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 3))
        self.b = nn.Parameter(torch.zeros(1))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(1))


WEIGHTS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.tensor([7.0]),
    "frozen": torch.arange(20.0, 23.0),
    "buffer": torch.tensor([30.0]),
}


def saved() -> WholeTraining:
    states = {
        number: {"step": torch.tensor(4.0), "exp_avg": 100 * WEIGHTS[name]}
        for number, name in enumerate("ab")
    }
    group = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.5).state_dict()
    optimizer = {"state": states, "param_groups": [{**group["param_groups"][0], "params": [0, 1]}]}
    return WholeTraining({"state_dict": WEIGHTS, "optimizer_states": [optimizer]}, ["a", "b"])


def address(start: int, numel: int) -> SimpleNamespace:
    return SimpleNamespace(start=start, numel=numel)


def engine_of_stage_2(model: Model) -> SimpleNamespace:
    """The second of two ranks: the last two values of `a`, and `b`; then padding."""
    model.a._hp_mapping = SimpleNamespace(
        hp_fragment_address=address(0, 2), lp_fragment_address=address(4, 2)
    )
    model.b._hp_mapping = SimpleNamespace(
        hp_fragment_address=address(2, 1), lp_fragment_address=address(0, 1)
    )
    flat = nn.Parameter(torch.zeros(4))
    called: list[str] = []
    zero = SimpleNamespace(
        bit16_groups=[[model.a, model.b]],
        single_partition_of_fp32_groups=[flat],
        optimizer=torch.optim.AdamW([flat], lr=0.1),
        update_lp_params=lambda: called.append("weights"),
        _link_all_hp_params=lambda: called.append("links"),
        called=called,
    )
    return SimpleNamespace(
        module=model, optimizer=zero, zero_optimization_partition_weights=lambda: False
    )


def test_stages_1_and_2_get_the_part_of_a_rank():
    model = Model()
    engine = engine_of_stage_2(model)
    assert trained_names(engine) == ["a", "b"]
    load_training(engine, saved(), WEIGHTS.keys())
    zero = engine.optimizer
    (flat,) = zero.single_partition_of_fp32_groups
    assert flat.tolist() == [4, 5, 7, 0]
    state = zero.optimizer.state[flat]
    assert state["exp_avg"].tolist() == [400, 500, 700, 0]
    assert state["step"].item() == 4
    assert zero.optimizer.param_groups[0]["lr"] == 0.5
    assert zero.called == ["weights", "links"]
    assert model.frozen.equal(WEIGHTS["frozen"])
    assert model.buffer.equal(WEIGHTS["buffer"])


def test_an_optimizer_of_another_class_is_left_alone():
    model = Model()
    engine = engine_of_stage_2(model)
    load_training(engine, saved(), WEIGHTS.keys(), with_optimizer=False)
    zero = engine.optimizer
    assert zero.single_partition_of_fp32_groups[0].tolist() == [4, 5, 7, 0]
    assert not zero.optimizer.state
    assert zero.optimizer.param_groups[0]["lr"] == 0.1


def test_what_is_not_in_a_checkpoint_is_left_alone():
    model = Model()
    load_training(engine_of_stage_2(model), saved(), ["a", "b"])
    assert not model.frozen.any()
    assert not model.buffer.any()


@pytest.mark.parametrize("name", ["a", "frozen"])
def test_a_weight_of_another_shape_is_refused_rather_than_cut(name, monkeypatch):
    longer = torch.cat([WEIGHTS[name], WEIGHTS[name]])
    monkeypatch.setitem(WEIGHTS, name, longer)
    what = rf"has '{name}' of shape \({longer.shape[0]},.*, so it belongs to a different policy"
    with pytest.raises(UserError, match=what):
        load_training(engine_of_stage_2(Model()), saved(), WEIGHTS.keys())


def divide(parameter: nn.Parameter, ds_id: int, rank: int) -> None:
    """Leave a parameter as stage 3 does on two ranks."""
    parameter.ds_zero_partition_rank = rank
    shape = parameter.shape
    parameter.data = torch.empty(0)
    parameter.ds_id, parameter.ds_shape, parameter.ds_numel = ds_id, shape, shape.numel()
    parameter.ds_tensor = torch.full([-(-shape.numel() // 2)], -1.0)


@pytest.mark.parametrize(
    ("rank", "flat", "frozen"), [(0, [0, 1, 2, 7], [20, 21]), (1, [3, 4, 5, 0], [22, -1])]
)
def test_stage_3_gets_the_part_of_a_rank_without_the_padding(rank, flat, frozen):
    model = Model()
    for number, one in enumerate((model.a, model.b, model.frozen)):
        divide(one, number, rank)
    own, called = nn.Parameter(torch.zeros(4)), []
    optimizer = torch.optim.AdamW([own], lr=0.1)
    group = optimizer.param_groups[0]
    zero = SimpleNamespace(
        fp16_groups=[[model.a, model.b]],
        fp32_partitioned_groups_flat=[own],
        grad_position={0: [0, 0, 3], 1: [0, 3, 1]},
        get_param_id=lambda one: one.ds_id,
        optimizer=optimizer,
        swap_optimizer=False,
        params_in_nvme_and_cpu=False,
        _set_fp32_optimizer_param_groups=lambda: group.update(params=[own]),
        _clear_fp32_optimizer_param_groups=lambda: group.update(params=[]),
        checkpoint_event_prologue=lambda: called.append("divides"),
        checkpoint_event_epilogue=lambda: called.append("gathers"),
    )
    group["params"] = []
    engine = SimpleNamespace(
        module=model, optimizer=zero, zero_optimization_partition_weights=lambda: True
    )
    load_training(engine, saved(), WEIGHTS.keys())
    assert own.tolist() == flat
    assert model.a.ds_tensor.tolist() == flat[:3]
    assert optimizer.state[own]["exp_avg"].tolist() == [100 * one for one in flat]
    assert model.frozen.ds_tensor.tolist() == frozen
    assert called == ["divides", "gathers"]
    assert group["params"] == []


@pytest.mark.parametrize("swapped", ["swap_optimizer", "params_in_nvme_and_cpu"])
def test_what_is_on_a_disk_is_not_written_to(swapped):
    swaps = {"swap_optimizer": False, "params_in_nvme_and_cpu": False, swapped: True}
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(**swaps), zero_optimization_partition_weights=lambda: True
    )
    with pytest.raises(UserError, match="got offloading to nvme"):
        load_training(engine, saved(), WEIGHTS.keys())
