"""Weights and moments are put together from what DeepSpeed writes on each rank.

`tests/end_to_end/test_sharded.py` reads what it has really written.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.distributed.deepspeed_checkpoints import WholeTraining, ZeROTraining
from lit_grpo.types import UserError

A, B, C = torch.arange(6.0).view(2, 3), torch.tensor([7.0]), torch.arange(10.0, 15.0)
FROZEN, BUFFER = torch.arange(20.0, 23.0), torch.tensor([30.0])
GROUPS = [{"a": A, "b": B}, {"c": C}]


def place(start: int, numel: int) -> SimpleNamespace:
    return SimpleNamespace(start=start, numel=numel)


def base(flats: list[torch.Tensor]) -> dict[str, Any]:
    """Return an optimizer whose moments are a hundred times the weights."""
    states = {
        number: {"step": torch.tensor(4.0), "exp_avg": 100 * flat}
        for number, flat in enumerate(flats)
    }
    return {"state": states, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}


def write(directory: Path, models: dict[str, Any], ranks: list[dict[str, Any]]) -> Path:
    for name, model in models.items():
        shapes = [{name: one.shape for name, one in group.items()} for group in GROUPS]
        model |= {"param_shapes": shapes, "shared_params": {"tied": "a"}}
        torch.save(model, directory / f"{name}_mp_rank_00_model_states.pt".removeprefix("_"))
    for rank, one in enumerate(ranks):
        file = directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": one}, file)
    return directory


def write_stage_2(directory: Path) -> Path:
    """Two ranks; the first group is padded to 8 values, the second to 6."""
    parts = [[A.flatten()[:4], C[:3]], [torch.cat([A.flatten()[4:], B]), C[3:]]]
    places = [
        [{"a": place(0, 4)}, {"c": place(0, 3)}],
        [{"a": place(0, 2), "b": place(2, 1)}, {"c": place(0, 2)}],
    ]
    padded = [parts[0], [torch.cat([one, torch.zeros(1)]) for one in parts[1]]]
    ranks = [
        {
            "single_partition_of_fp32_groups": flats,
            "base_optimizer_state": base(with_padding),
            "param_slice_mappings": mappings,
        }
        for flats, with_padding, mappings in zip(parts, padded, places, strict=True)
    ]
    module = {"a": A, "b": B, "c": C, "tied": A, "frozen": FROZEN, "buffer": BUFFER}
    return write(directory, {"": {"module": module, "frozen_param_shapes": None}}, ranks)


def write_stage_3(directory: Path) -> Path:
    """Two ranks with half of each weight; the first group is in two flat tensors."""
    nan = torch.tensor([float("nan")])  # the padding
    parts = [[A.flatten()[:3], B, C[:3]], [A.flatten()[3:], nan, torch.cat([C[3:], nan])]]
    frozen = [FROZEN[:2], torch.cat([FROZEN[2:], nan])]
    empty = dict.fromkeys(("a", "b", "c", "tied", "frozen"), torch.empty(0))
    models = {
        f"zero_pp_rank_{rank}": {
            "module": empty | {"buffer": BUFFER},
            "frozen_param_shapes": {"frozen": FROZEN.shape},
            "frozen_param_fragments": {"frozen": frozen[rank]},
        }
        for rank in (0, 1)
    }
    ranks = [{"fp32_flat_groups": one, "optimizer_state_dict": base(one)} for one in parts]
    return write(directory, models, ranks)


@pytest.mark.parametrize("write_stage", [write_stage_2, write_stage_3])
def test_weights_and_moments_are_whole(tmp_path, write_stage):
    training = ZeROTraining(write_stage(tmp_path))
    weights = {"a": A, "b": B, "c": C, "tied": A, "frozen": FROZEN, "buffer": BUFFER}
    for name, expected in weights.items():
        assert training.weight(name).equal(expected), name
    for name, expected in (("a", A), ("b", B), ("c", C)):
        state = training.state(name)
        assert state["step"].item() == 4
        assert state["exp_avg"].equal(100 * expected)
    assert training.groups == [["a", "b"], ["c"]]
    assert [one["lr"] for one in training.param_groups] == [0.1, 0.2]


def test_each_weight_has_a_count_of_steps_of_its_own(tmp_path):
    """Optimizers count in place: a tensor that all share would count each of them."""
    training = ZeROTraining(write_stage_3(tmp_path))
    training.state("a")["step"].add_(1)
    assert training.state("b")["step"].item() == 4


def test_what_an_optimizer_keeps_by_blocks_cannot_be_divided_otherwise(tmp_path):
    file = write_stage_3(tmp_path) / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    saved = torch.load(file)
    saved["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["absmax"] = torch.ones(1)
    torch.save(saved, file)
    other = tmp_path / file.name.replace("rank_0_mp", "rank_1_mp")
    torch.save(saved, other)
    with pytest.raises(UserError, match=r"'absmax' of the optimizer must have a value for each"):
        ZeROTraining(tmp_path).state("a")


def test_a_whole_checkpoint_has_states_by_the_order_of_the_weights():
    states = {0: {"step": torch.tensor(1.0)}, 1: {"step": torch.tensor(2.0)}}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    checkpoint = {"state_dict": {"a": A, "b": B}, "optimizer_states": [optimizer]}
    training = WholeTraining(checkpoint, ["b", "a"])
    assert training.weight("a") is A
    assert training.state("b")["step"].item() == 1
    assert training.state("a")["step"].item() == 2
    assert WholeTraining(checkpoint, ["b", "a", "new"]).state("new") == {}
