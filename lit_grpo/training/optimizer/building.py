"""Build the optimizer of a config or a program, with errors that name the setting."""

from __future__ import annotations

import re
from inspect import signature

from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torch.optim import Optimizer

from lit_grpo.types import UserError, setting_error
from lit_grpo.types.settings import shown
from lit_grpo.types.spelling import closest


def check_function(make_optimizer: object) -> None:
    """Check that an optimizer is given as a function of the parameters.

    Raises:
        UserError: it is something else, such as an optimizer.
    """
    if not callable(make_optimizer):
        raise setting_error(
            "model.optimizer",
            "a function that makes an optimizer of parameters, such as "
            "functools.partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.0)",
            shown(make_optimizer),
        )


def built_by(make_optimizer: OptimizerCallable, parameters: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer that a function makes of the trained parameters.

    Raises:
        UserError: it cannot be made, or trains nothing of the policy.
    """
    try:
        optimizer = make_optimizer(parameters)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optimizer must be one that can be made ({error}{_hint(make_optimizer, error)}). Set "
            "model.optimizer."
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise setting_error(
            "model.optimizer",
            "a function that returns an optimizer of torch",
            f"one that returns {shown(optimizer)}",
            "" if optimizer is not None else "its return is missing?",
        )
    given = {id(one) for group in optimizer.param_groups for one in group["params"]}
    if given.isdisjoint(map(id, parameters)):
        raise setting_error(
            "model.optimizer",
            "a function that makes an optimizer of the parameters that it is given",
            f"{type(optimizer).__name__} of other parameters",
            "the policy would never change",
        )
    return optimizer


def _hint(make_optimizer: OptimizerCallable, error: Exception) -> str:
    """Return what may be wrong with the settings of an optimizer that cannot be made."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown is None:
        return "; are all of its settings numbers?" if isinstance(error, TypeError) else ""
    known = list(signature(getattr(make_optimizer, "func", make_optimizer)).parameters)
    is_rate = "learning" in unknown[1] and "lr" in known
    meant = "lr" if is_rate else closest(unknown[1], known)
    return f"; did you mean {meant}?" if meant else ""
