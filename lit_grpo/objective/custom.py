"""Your own functions in the objective, named in the config by their path.

A function's arguments are checked when the config is read. Its result is also checked: its shape
at every call, its values at the first one. A function that is wrong ends the run with what was
expected of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lit_grpo.types import RewardTable, UserCodeFailed, UserError
from lit_grpo.types.functions import defined_at, unfit_signature, users_traceback
from lit_grpo.types.plain import import_path
from lit_grpo.types.saved_state import saved_state

Function = Callable[..., Any]
"""A function or a callable object; in a config, its import path or that of its class."""

_known_to_be_finite: list[Function] = []
"""Values are looked at once only, since that waits for a GPU. Objects need not be hashable."""


def function_states(functions: Mapping[str, Function]) -> dict[str, Any]:
    """Return key -> state of each function that is an object with a ``state_dict``."""
    return {
        key: saved_state(f"model.{key}", one.state_dict())
        for key, one in functions.items()
        if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
    }


def load_function_states(functions: Mapping[str, Function], states: Mapping[str, Any]) -> None:
    """Restore the states of the functions that had one."""
    for key, state in states.items():
        if hasattr(functions.get(key), "load_state_dict"):
            functions[key].load_state_dict(state)  # type: ignore[attr-defined]


def check_arguments(key: str, choice: object, *arguments: str) -> None:
    """Check that a user's function takes what it is called with; one of our names passes.

    Raises:
        UserError: it cannot be called with so many arguments.
    """
    if not callable(choice) or (signature := unfit_signature(choice, arguments)) is None:
        return
    name = defined_at(choice)[0].__name__
    whole = ", ".join(["self", *arguments] if name == "__call__" else arguments)
    raise UserError(
        f"{key.removeprefix('model.')} must be a function of {' and '.join(arguments)}, got "
        f"{describe(choice)}, which takes {signature} (it is called with those by position). "
        f"Define def {name}({whole}), or set another {key}."
    )


def checked_advantages(function: Function, table: RewardTable) -> Tensor:
    """Return the [B, G] float64 advantages of a user's function.

    Raises:
        UserError: they do not have the shape of the rewards, or are not finite.
    """
    shape = tuple(table.rewards.shape)
    what = "one advantage per completion"
    advice = (
        "Completions without a reward are NaN in table.rewards, and False in table.valid: give "
        "them 0."
    )
    own = replace(  # which the function may change
        table,
        rewards=table.rewards.clone(),
        parts={name: part.clone() for name, part in table.parts.items()},
        weights=dict(table.weights),
        valid=table.valid.clone(),
        lengths=table.lengths.clone(),
    )
    found = call(function, {"table": own}, [shape], what, always_finite=True, advice=advice)
    return found.double()


def _tensors(arguments: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a function gets, also those of its inputs and of their batch."""
    inputs = arguments.get("inputs")
    batch = getattr(inputs, "batch", None)
    for prefix, held in (("", arguments), ("inputs.", _fields(inputs)), ("batch.", _fields(batch))):
        for name, one in held.items():
            if isinstance(one, Tensor) and not one.is_inference():
                yield f"{prefix}{name}", one


def _fields(one: Any) -> dict[str, object]:
    return {} if one is None else {field.name: getattr(one, field.name) for field in fields(one)}


def _refuse_changed(function: Function, versions: Sequence[tuple[str, Tensor, int]]) -> None:
    """Refuse a function that has changed tensors in place.

    Args:
        versions: The tensors that it got, their names, and how often they had been changed before.

    Raises:
        UserError: it has changed one.
    """
    for name, tensor, version in versions:
        if tensor._version != version:
            raise UserError(
                f"{describe(function)} must leave its arguments as they are, but has changed "
                f"{name} in place (metrics, other parts of the loss and later updates read it, "
                f"too). Write x = x - 1, not x -= 1 or x.sub_(1), or change {name}.clone()."
            )


def call(
    function: Function,
    arguments: Mapping[str, object],
    shapes: Sequence[tuple[int, ...]],
    what: str,
    *,
    needs_gradient: bool = False,
    always_finite: bool = False,
    advice: str = "Bound logarithms and exponents, and do not divide by 0.",
) -> Tensor:
    """Return what a user's function returns, if it is as expected.

    Args:
        arguments: Name -> argument, in the order of the function's parameters.
        shapes: The shapes that are allowed.
        what: What the values are, for the message.
        needs_gradient: Whether a result without a gradient would train nothing.
        always_finite: Whether every call is checked for values that are not finite, not the first
            alone: that waits for the device.
        advice: What to do about such values.

    Raises:
        UserError: it is not a tensor of such a shape, has no gradient, or a value is not finite; or
            the function has changed an argument.
        UserCodeFailed: the function has raised an exception.
    """
    versions = [(name, one, one._version) for name, one in _tensors(arguments)]
    try:
        result = function(*arguments.values())
    except Exception as error:
        raise UserCodeFailed(f"{describe(function)} failed:\n{users_traceback(error)}") from error
    _refuse_changed(function, versions)
    allowed = " or ".join(map(str, shapes))
    rule = f"{describe(function)} must return {what}, a tensor of shape {allowed}"
    if not isinstance(result, Tensor):
        raise UserError(f"{rule}, got {type(result).__name__} {str(result)[:100]}.")
    if tuple(result.shape) not in shapes:
        raise UserError(f"{rule}, got shape {tuple(result.shape)}.")
    if not result.is_floating_point():
        raise UserError(f"{rule}, of floating point numbers, got {result.dtype}.")
    if needs_gradient and not result.requires_grad:
        raise UserError(
            f"{rule}, with a gradient, got one without (it would train nothing). Compute it from "
            "inputs.logprobs, inputs.log_ratio or inputs.ratio, without detach or no_grad."
        )
    if always_finite or not any(known is function for known in _known_to_be_finite):
        if not bool(result.isfinite().all()):
            wrong = int((~result.isfinite()).sum())
            raise UserError(
                f"{rule}, all finite, got {wrong} of {result.numel()} values that are NaN or "
                f"infinite. {advice}"
            )
        _known_to_be_finite.append(function)
    return result


def checked_metrics(metrics: Mapping[str, Tensor | float], mask: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the user's functions, each a [N, C], [N, 1] or [] tensor.

    Args:
        mask: [N, C] True on the tokens in the loss.

    Raises:
        UserError: a metric has another type or shape.
    """
    found = {}
    for name, value in metrics.items():
        is_number = isinstance(value, Real)
        made = torch.tensor(float(value)) if is_number else value
        shapes = [tuple(mask.shape), (len(mask), 1), ()]
        if not isinstance(made, Tensor) or tuple(made.shape) not in shapes:
            got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise UserError(
                f"inputs.metrics[{name!r}] must be a number or a tensor of shape "
                f"{shapes[0]} or {shapes[1]}, got {got} (its mean over the tokens is logged). Set "
                "it to one value per token, one per sequence, or a number."
            )
        found[name] = made.detach().to(mask.device)
    return found


def describe(function: Function) -> str:
    """Return the name of a function with its file and line."""
    named, code = defined_at(function)
    name = import_path(named)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
