"""Refuse what has the state of another run: modules, policies, rewards, callbacks, loggers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_grpo.types import UserError

_RUN_DIR, _HAS_TRAINED = "_lit_grpo_run_dir", "_lit_grpo_has_trained"
"""Attributes of a callback or logger: the run that it belongs to, and whether that has begun. A
reward has the first once it has taken part in a step."""


def claim_for_run(given: Iterable[Callback | Logger], run_dir: Path) -> None:
    """Let callbacks and loggers that keep a state belong to one run directory.

    Raises:
        UserError: one was used in another run directory: it would write there, or has its state.
    """
    stateful, run_dir = [*filter(_keeps_state, given)], run_dir.absolute()
    for one in stateful:
        earlier = getattr(one, _RUN_DIR, run_dir)
        if earlier != run_dir:
            raise _of_another_run(one, earlier)
    for one in stateful:
        setattr(one, _RUN_DIR, run_dir)


def mark_as_trained(
    model: L.LightningModule, given: Iterable[Callback | Logger], run_dir: Path
) -> None:
    """Remember that these have taken part in the steps of a run."""
    model.trained_in = run_dir  # type: ignore[assignment]
    if (policy := getattr(model, "policy", None)) is not None:
        policy.trained_in = run_dir
    for one in filter(_keeps_state, given):
        setattr(one, _HAS_TRAINED, True)
    for reward in _rewards_with_state(model):
        setattr(reward, _RUN_DIR, run_dir)


def refuse_trained(model: L.LightningModule, given: Iterable[Callback | Logger]) -> None:
    """Refuse to start a run with what has taken part in another.

    Raises:
        UserError: the run would start from the weights of that one instead of its policy's, or
            with the state of a callback or a reward.
    """
    for what, kind, one in (
        ("module", "module", model),
        ("policy", "Policy", getattr(model, "policy", None)),
    ):
        if (earlier := getattr(one, "trained_in", None)) is not None:
            raise UserError(
                f"this {what} was trained in {earlier}, and a new run would start from those "
                f"weights instead of its policy's. Make a new {kind} for each run. To start from "
                f"the result, use the policy {earlier}/final; to go on with that run, its run_dir "
                'and ckpt_path "last".'
            )
        if getattr(one, "has_trained", False):
            raise UserError(
                f"this {what} was trained before, by a lightning.Trainer or with fast_dev_run, and "
                f"a new run would start from those weights instead of its policy's. Make a new "
                f"{kind} for each run. To start from the result, write it with "
                "policy.save_pretrained(directory), and use Policy(directory)."
            )
    for one in filter(_keeps_state, given):
        if getattr(one, _HAS_TRAINED, False):
            raise _of_another_run(one, getattr(one, _RUN_DIR))
    _refuse_rewards(model)


def _refuse_rewards(model: L.LightningModule) -> None:
    """Refuse rewards with the state of another run."""
    for reward in _rewards_with_state(model):
        if (earlier := getattr(reward, _RUN_DIR, None)) is not None:
            kind = type(reward).__name__
            raise UserError(
                f"this {kind} has the state (state_dict) of the run {earlier}, and a new run would "
                f"go on from it. Make a new {kind} for each run. Set rewards of the module."
            )


def _rewards_with_state(model: L.LightningModule) -> list[Any]:
    """Return the user's rewards that define ``state_dict``; each run resets the built-in ones."""
    rewards: Any = getattr(model, "rewards", None)
    return [
        one
        for one in getattr(rewards, "rewards", ())
        if not type(one).state_dict.__module__.startswith("lit_grpo.")
    ]


def _keeps_state(one: Callback | Logger) -> bool:
    """Return whether an object belongs to one run.

    Every logger and built-in callback does, and the user's callbacks with a ``state_dict``.
    """
    is_ours = any(kind.__module__.startswith("lit_grpo.") for kind in type(one).__mro__)
    return is_ours or isinstance(one, Logger) or is_overridden("state_dict", one, parent=Callback)


def _of_another_run(one: Callback | Logger, run_dir: Path) -> UserError:
    kind, setting = type(one).__name__, "logger" if isinstance(one, Logger) else "callbacks"
    return UserError(
        f"this {kind} belongs to the run {run_dir}: it writes there, or still has its state, such "
        f"as the best value so far. Make a new {kind} for each run. Set {setting} of Trainer."
    )
