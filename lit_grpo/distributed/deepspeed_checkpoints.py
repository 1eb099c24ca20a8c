"""Read what DeepSpeed has written, weight by weight, whatever stage and number of ranks wrote it.

DeepSpeed itself only resumes with the same stage and number of ranks. Each rank has written flat
tensors, in which its parts of the trained weights lie one after the other: one of the weights, and
one of each moment of the optimizer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lit_grpo.types import UserError


class Training(Protocol):
    """The state of a training run, weight by weight."""

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The groups of the optimizer, without their parameters."""

    def weight(self, name: str) -> Tensor:
        """Return a weight or a buffer."""

    def state(self, name: str) -> dict[str, Any]:
        """Return what the optimizer has of a trained weight: moments, and counts of steps."""


class WholeTraining:
    """A checkpoint that is not sharded.

    Args:
        names: Names of the trained weights, in the order of the optimizer.
    """

    def __init__(self, checkpoint: Mapping[str, Any], names: Sequence[str]) -> None:
        self._weights = checkpoint["state_dict"]
        (optimizer,) = checkpoint["optimizer_states"]
        self._states = optimizer["state"]
        self._numbers = {name: number for number, name in enumerate(names)}
        self.param_groups: list[Mapping[str, Any]] = optimizer["param_groups"]

    def weight(self, name: str) -> Tensor:
        weight: Tensor = self._weights[name]
        return weight

    def state(self, name: str) -> dict[str, Any]:
        return dict(self._states.get(self._numbers[name], {}))


class _Piece(NamedTuple):
    """Where a rank has its part of a weight: in the flat tensors of a group."""

    rank: int
    group: int
    start: int
    size: int


class ZeROTraining:
    """The state that the ranks of a run wrote to a directory, mapped into memory from its files."""

    def __init__(self, directory: Path) -> None:
        self._models = _load_all(directory, "model")
        self._ranks = [one["optimizer_state_dict"] for one in _load_all(directory, "optim")]
        self._is_stage_3 = "fp32_flat_groups" in self._ranks[0]
        self.groups: list[list[str]] = [[*one] for one in self._models[0]["param_shapes"]]
        """The names of the trained weights, by group of the optimizer."""
        shapes = self._models[0]["param_shapes"]
        self._shapes: dict[str, torch.Size] = {
            name: shape for group in shapes for name, shape in group.items()
        }
        self._pieces: dict[str, list[_Piece]] = defaultdict(list)
        for name, piece in self._pieces_3() if self._is_stage_3 else self._pieces_1_and_2():
            self._pieces[name].append(piece)

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        groups: list[Mapping[str, Any]] = self._base(0)["param_groups"]
        return groups

    def weight(self, name: str) -> Tensor:
        model = self._models[0]
        name = model["shared_params"].get(name, name)  # of tied ones only one is trained
        if name in self._pieces:
            return self._whole(name, [self._flat(one) for one in self._pieces[name]])
        if not self._is_stage_3 or name not in (model["frozen_param_shapes"] or {}):
            weight: Tensor = model["module"][name]
            return weight
        shape = model["frozen_param_shapes"][name]
        parts = [one["frozen_param_fragments"][name] for one in self._models]
        return torch.cat(parts)[: shape.numel()].view(shape)

    def state(self, name: str) -> dict[str, Any]:
        """Return what the optimizer has of a trained weight.

        Raises:
            UserError: the optimizer keeps something other than one value per element of the weight.
        """
        pieces = self._pieces[name]
        states = [self._base(one.rank)["state"].get(one.group, {}) for one in pieces]
        return {key: self._whole_state(name, key, states) for key in states[0]}

    def _whole_state(self, name: str, key: str, states: Sequence[Mapping[str, Any]]) -> Any:
        value, pieces = states[0][key], self._pieces[name]
        if not torch.is_tensor(value):
            return value
        if value.dim() == 0:  # a count of steps; each weight needs its own tensor
            return value.clone()
        flat = [self._flat(one, with_rest=True).numel() for one in pieces]
        parts = [state[key] for state in states]
        # Stages 1 and 2 leave out the padding of weights, but not of moments.
        if any(part.numel() < size for part, size in zip(parts, flat, strict=True)):
            raise UserError(
                f"{key!r} of the optimizer must have a value for each of the weights, got "
                f"{tuple(value.shape)} for {flat[0]} (it cannot be divided otherwise). Resume "
                "with the strategy and the number of ranks of the run that wrote the checkpoint."
            )
        return self._whole(
            name,
            [part[at.start : at.start + at.size] for part, at in zip(parts, pieces, strict=True)],
        )

    def _whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        shape = self._shapes[name]
        return torch.cat([*parts])[: shape.numel()].view(shape)

    def _flat(self, piece: _Piece, *, with_rest: bool = False) -> Tensor:
        flats = self._ranks[piece.rank][
            "fp32_flat_groups" if self._is_stage_3 else "single_partition_of_fp32_groups"
        ]
        flat: Tensor = flats[piece.group]
        return flat if with_rest else flat[piece.start : piece.start + piece.size]

    def _base(self, rank: int) -> dict[str, Any]:
        """Return the state dict of the optimizer that takes the steps of a rank."""
        key = "optimizer_state_dict" if self._is_stage_3 else "base_optimizer_state"
        base: dict[str, Any] = self._ranks[rank][key]
        return base

    def _pieces_1_and_2(self) -> Iterator[tuple[str, _Piece]]:
        for rank, saved in enumerate(self._ranks):
            for group, places in enumerate(saved["param_slice_mappings"]):
                for name, place in places.items():
                    yield name, _Piece(rank, group, place.start, place.numel)

    def _pieces_3(self) -> Iterator[tuple[str, _Piece]]:
        """Yield the pieces of stage 3, which have the same size on all ranks."""
        num_ranks = len(self._ranks)
        for rank, saved in enumerate(self._ranks):
            flats, group, start = saved["fp32_flat_groups"], 0, 0
            for name, shape in self._shapes.items():
                if start == flats[group].numel():
                    group, start = group + 1, 0
                size = -(-shape.numel() // num_ranks)
                yield name, _Piece(rank, group, start, size)
                start += size


def _load_all(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Load the files of a kind, in the order of their ranks."""
    number = re.compile(r"zero_pp_rank_(\d+)_")

    def rank(file: Path) -> int:
        found = number.search(file.name)  # stages 1 and 2 have one file of the model
        return int(found[1]) if found else 0

    files = sorted(directory.glob(f"*_{kind}_states.pt"), key=rank)
    return [torch.load(one, map_location="cpu", mmap=True, weights_only=False) for one in files]
