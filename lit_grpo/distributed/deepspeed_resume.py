"""Load the state of a training run into an engine of DeepSpeed, whatever it was trained with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_grpo.distributed.deepspeed_checkpoints import Training
from lit_grpo.policy.files.model_source import refuse_other_shape
from lit_grpo.policy.sharding import is_partitioned, whole_shape
from lit_grpo.types import UserError


class _Part(NamedTuple):
    """A rank's part of a trained weight."""

    parameter: Any
    group: int
    """Index among the flat tensors that have the rank's parts."""
    offset: int
    """Place of the part in the flat tensors."""
    start: int
    """Place of the part in the flattened weight."""
    size: int


def trained_names(engine: Any) -> list[str]:
    """Return the names of the trained weights, in the order of the optimizer."""
    names = {one: name for name, one in engine.module.named_parameters()}
    zero = engine.optimizer
    groups = zero.fp16_groups if _is_stage_3(engine) else zero.bit16_groups
    return [names[one] for group in groups for one in group]


@torch.no_grad()
def load_training(
    engine: Any, training: Training, names: Collection[str], *, with_optimizer: bool = True
) -> None:
    """Load weights, buffers and the optimizer; every rank must call this.

    Args:
        names: Names of the weights and buffers to load; the others are left alone.
        with_optimizer: False leaves the optimizer alone.

    Raises:
        UserError: the engine keeps its state elsewhere than in memory, or a weight has another
            shape.
    """
    _refuse_swapped(engine)
    if _is_stage_3(engine):
        engine.optimizer.checkpoint_event_prologue()
    _load_trained(engine, training, with_optimizer=with_optimizer)
    frozen = {name: one for name, one in engine.module.named_parameters() if not one.requires_grad}
    for name, one in (frozen | dict(engine.module.named_buffers())).items():
        if name in names:
            _copy_part(_weight(training, name, one), one)
    if _is_stage_3(engine):
        engine.optimizer.checkpoint_event_epilogue()


def _refuse_swapped(engine: Any) -> None:
    zero = engine.optimizer
    if _is_stage_3(engine) and (zero.swap_optimizer or zero.params_in_nvme_and_cpu):
        raise UserError(
            "trainer.strategy must keep weights and optimizer state in memory to resume from a "
            "checkpoint of another strategy, stage, number of ranks or optimizer, got offloading "
            "to nvme (where only DeepSpeed's own loading writes them). Set both devices to cpu, or "
            "trainer.strategy, trainer.devices and model.optimizer as in the run that wrote the "
            "checkpoint."
        )


def _is_stage_3(engine: Any) -> bool:
    return bool(engine.zero_optimization_partition_weights())


def _load_trained(engine: Any, training: Training, *, with_optimizer: bool) -> None:
    zero, names = engine.optimizer, {one: name for name, one in engine.module.named_parameters()}
    is_stage_3 = _is_stage_3(engine)
    flats = (
        zero.fp32_partitioned_groups_flat if is_stage_3 else zero.single_partition_of_fp32_groups
    )
    states: dict[int, dict[str, Any]] = {number: {} for number in range(len(flats))}
    for part in _parts_3(zero) if is_stage_3 else _parts_1_and_2(zero):
        name, flat = names[part.parameter], flats[part.group]
        values = _cut(_weight(training, name, part.parameter), part)
        flat[part.offset : part.offset + part.size].copy_(values)
        if is_stage_3:
            part.parameter.ds_tensor[: part.size].copy_(values)
        if with_optimizer:
            _add_state(states[part.group], training.state(name), part, flat)
    if is_stage_3:
        zero._set_fp32_optimizer_param_groups()
    if with_optimizer:
        _load_optimizer(zero.optimizer, states, training)
    if is_stage_3:
        zero._clear_fp32_optimizer_param_groups()
    else:
        zero.update_lp_params()
        zero._link_all_hp_params()


def _parts_1_and_2(zero: Any) -> Iterator[_Part]:
    for group, parameters in enumerate(zero.bit16_groups):
        for parameter in parameters:
            if (mapping := parameter._hp_mapping) is not None:  # else other ranks have all of it
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield _Part(parameter, group, here.start, there.start, there.numel)


def _parts_3(zero: Any) -> Iterator[_Part]:
    for parameters in zero.fp16_groups:
        for parameter in parameters:
            group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = min(size * parameter.ds_zero_partition_rank, parameter.ds_numel)
            yield _Part(parameter, group, offset, start, min(size, parameter.ds_numel - start))


def _weight(training: Training, name: str, own: Tensor) -> Tensor:
    """Return a weight of a training run; check its shape, as a part would fit a smaller weight."""
    weight = training.weight(name)
    refuse_other_shape(name, weight.shape, whole_shape(own))
    return weight


def _cut(whole: Tensor, part: _Part) -> Tensor:
    return whole.flatten()[part.start : part.start + part.size]


def _add_state(state: dict[str, Any], whole: Mapping[str, Any], part: _Part, flat: Tensor) -> None:
    """Add a part of what the optimizer has of a weight to the state of a flat tensor."""
    for key, value in whole.items():
        if not torch.is_tensor(value) or value.dim() == 0:
            state[key] = value
            continue
        if key not in state:
            state[key] = torch.zeros_like(flat, dtype=value.dtype)
        state[key][part.offset : part.offset + part.size].copy_(_cut(value, part))


def _load_optimizer(optimizer: Any, states: dict[int, dict[str, Any]], training: Training) -> None:
    now = optimizer.state_dict()["param_groups"]
    groups = [
        {**saved, "params": own["params"]}
        for saved, own in zip(training.param_groups, now, strict=True)
    ]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _copy_part(whole: Tensor, one: Tensor) -> None:
    """Copy a weight that is not trained, or a buffer; of a partitioned one the rank's part."""
    if not is_partitioned(one):
        one.copy_(whole)
        return
    partitioned: Any = one
    part: Tensor = partitioned.ds_tensor
    assert part.dtype == one.dtype, "a weight in 8 bits has a scale beside its values"
    values = whole.flatten()[part.numel() * partitioned.ds_zero_partition_rank :][: part.numel()]
    part[: values.numel()].copy_(values)
