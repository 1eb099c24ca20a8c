"""What `fit`, `validate` and `test` of a trainer may be called with."""

from __future__ import annotations

import lightning as L

from lit_grpo.types import UserError
from lit_grpo.types.overrides import check_constructors
from lit_grpo.types.plain import described


def check_arguments(call: str, model: object, datamodule: object) -> None:
    """Check that a call has a module and then data.

    Raises:
        UserError: it has something else, or the two in the other order.
    """
    if isinstance(model, L.LightningDataModule) and isinstance(datamodule, L.LightningModule):
        raise UserError(
            f"{call} takes the module first and then the data, got {type(model).__name__} and "
            f"then {type(datamodule).__name__}. Write {call}(module, data)."
        )
    check_module(call, model)
    if not isinstance(datamodule, L.LightningDataModule):
        raise UserError(
            f"{call} takes a module and then data that keep their position for a resume, such as "
            f"lit_grpo.PromptData(train=…), which takes files and lists of rows; got "
            f"{described(datamodule)} as the data. Write {call}(module, data)."
        )


def check_module(call: str, model: object) -> None:
    """Check that a module is one of lit-grpo's, made in full.

    Raises:
        UserError: it is something else, or a subclass does not call its base class's constructor.
    """
    if not hasattr(model, "check_trainer") or isinstance(model, type):
        raise UserError(
            f"{call} takes a module, such as lit_grpo.GRPOModule(…), and then data, got "
            f"{described(model)} as the module. Write {call}(module, data)."
        )
    check_constructors(type(model))
