"""Checkpoints of one process; `tests/end_to_end/test_sharded.py` has those of several."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lit_grpo.distributed.checkpoints import (
    OTHERS,
    WRITE,
    ZERO_TAG,
    is_complete,
    is_deepspeed,
    is_sharded,
    load_sharded,
    load_whole,
    local_part,
    read_others,
    read_whole,
    save_sharded,
)


class Training(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def states(self) -> list[torch.Tensor]:
        """Return all weights and the moments of the trained ones."""
        moments = [
            one for state in self.optimizer.state_dict()["state"].values() for one in state.values()
        ]
        return [*self.model.state_dict().values(), *moments]


def train(num_steps: int, *, seed: int = 0) -> Training:
    """Take steps of a model whose first layer is not trained."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return Training(model, optimizer)


def save(training: Training, directory: Path) -> Path:
    directory.mkdir()
    checkpoint = {
        "state_dict": training.model.state_dict(),
        "optimizer_states": [get_optimizer_state_dict(*training)],
        "global_step": 7,
    }
    save_sharded(checkpoint, directory)()
    return directory


def assert_same(one: Training, other: Training) -> None:
    torch.testing.assert_close(one.states(), other.states(), rtol=0, atol=0)


def test_what_was_saved_is_loaded_into_another_model_and_its_optimizer(tmp_path):
    saved, loaded = train(3), train(1, seed=1)
    directory = save(saved, tmp_path / "x.ckpt")
    weights = load_sharded(directory, loaded.model, [loaded.optimizer])
    assert_same(loaded, saved)
    assert weights.keys() == saved.model.state_dict().keys()


def test_weights_that_are_not_in_the_checkpoint_are_left_alone(tmp_path):
    saved = train(3)
    (tmp_path / "x.ckpt").mkdir()
    trained = {name: one for name, one in saved.model.state_dict().items() if name[0] == "1"}
    save_sharded({"state_dict": trained}, tmp_path / "x.ckpt")()
    other = train(0, seed=1)
    before = other.model[0].weight.clone()
    assert load_sharded(tmp_path / "x.ckpt", other.model, []).keys() == trained.keys()
    assert torch.equal(other.model[0].weight, before)
    assert torch.equal(other.model[1].weight, saved.model[1].weight)


def test_a_whole_checkpoint_is_that_of_one_process(tmp_path):
    saved = train(3)
    whole = read_whole(save(saved, tmp_path / "x.ckpt"))
    assert whole["global_step"] == 7
    torch.testing.assert_close(whole["state_dict"], dict(saved.model.state_dict()))
    (optimizer,) = whole["optimizer_states"]
    expected = saved.optimizer.state_dict()
    torch.testing.assert_close(optimizer["state"], expected["state"])
    assert [group["params"] for group in optimizer["param_groups"]] == [[0, 1]]
    assert optimizer["param_groups"][0]["lr"] == 0.1
    loaded = train(1, seed=1)
    load_whole(whole, loaded.model, [loaded.optimizer])
    assert_same(loaded, saved)


def test_an_optimizer_that_cannot_use_the_state_of_a_whole_checkpoint_is_left_out(tmp_path):
    saved, loaded = train(3), train(0, seed=1)
    load_whole(read_whole(save(saved, tmp_path / "x.ckpt")), loaded.model, [])
    torch.testing.assert_close(loaded.model.state_dict(), saved.model.state_dict())
    assert not loaded.optimizer.state


def test_the_rest_is_read_without_the_tensors(tmp_path):
    directory = save(train(1), tmp_path / "x.ckpt")
    assert read_others(directory, weights_only=True) == {"global_step": 7}
    assert read_whole(directory, with_optimizers=False)["optimizer_states"] == []


def test_tensors_may_be_written_by_a_function_that_is_not_saved_itself(tmp_path):
    written = []
    checkpoint = {"state_dict": {}, WRITE: written.append, "global_step": 7}
    save_sharded(checkpoint, tmp_path)()
    assert written == [str(tmp_path)]
    assert read_others(tmp_path) == {"global_step": 7}
    assert is_sharded(checkpoint)
    assert not is_sharded({"state_dict": {"weight": torch.ones(1)}})


def test_a_checkpoint_is_complete_with_its_tensors_and_the_rest(tmp_path):
    directory = save(train(1), tmp_path / "x.ckpt")
    assert is_complete(directory)
    assert not is_deepspeed(directory)
    (directory / ".metadata").unlink()
    assert not is_complete(directory)
    (directory / ZERO_TAG).mkdir()
    assert is_complete(directory)
    assert is_deepspeed(directory)
    (directory / OTHERS).unlink()
    assert not is_complete(directory)


def partitioned(values: list[float], num_values: int) -> torch.Tensor:
    """Return a parameter as ZeRO-3 leaves it, whose part on this rank has these values."""
    parameter = torch.empty(0)
    for name, value in {"id": 0, "numel": num_values, "tensor": torch.tensor(values)}.items():
        setattr(parameter, f"ds_{name}", value)
    return parameter


@pytest.mark.parametrize(
    ("num_values", "rank", "expected"),
    [(6, 0, [1.0, 2.0]), (6, 2, [1.0, 2.0]), (5, 2, [1.0]), (4, 2, [])],
)
def test_the_part_of_a_rank_is_without_padding(monkeypatch, num_values, rank, expected):
    """Three ranks have two values each."""
    monkeypatch.setattr("lit_grpo.distributed.checkpoints.get_rank", lambda: rank)
    assert local_part(partitioned([1.0, 2.0], num_values)).tolist() == expected


def test_a_tensor_that_is_not_sharded_is_its_own_part():
    tensor = torch.ones(2)
    assert local_part(tensor) is tensor
