"""The trainer's defaults, and the settings and arguments that a run refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import MPSAccelerator

from lit_grpo.types import UserError, check_range, setting_error
from lit_grpo.types.overrides import check_made
from lit_grpo.types.plain import described
from lit_grpo.types.settings import check_type

TRAINER_DEFAULTS = {
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "max_epochs": -1,  # no limit; Lightning would set 1000
    "num_sanity_val_steps": 0,
}
"""Defaults that differ from Lightning's. A run without max_steps and max_epochs never ends; only a
linear or cosine schedule refuses it."""

_PROCESSES = ("strategy", "devices", "num_nodes")

EXAMPLES = {
    "callbacks": "callbacks=[lit_grpo.callbacks.TimingLog()]",
    "logger": "logger=WandbLogger(project=...), which is in lightning.pytorch.loggers",
}
"""What a program writes instead of a name."""

NO_GPU = (
    "trainer.accelerator must be one that this machine has, got gpu, of which torch finds none "
    "(see nvidia-smi, and whether torch is a build for GPUs). Set trainer.accelerator to auto or "
    "cpu."
)
"""Said of a GPU where there is none; the command line replaces Lightning's message by it."""

_MINIMA = {
    **dict.fromkeys(("max_steps", "max_epochs", "num_sanity_val_steps"), -1),
    **dict.fromkeys(("min_steps", "min_epochs", "log_every_n_steps"), 0),
    **dict.fromkeys(("accumulate_grad_batches", "check_val_every_n_epoch", "num_nodes"), 1),
    "reload_dataloaders_every_n_epochs": 0,
}
"""Setting that counts something -> the least that it may be."""
_BATCH_LIMITS = (
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    "overfit_batches",
)
"""Settings that are a number of batches, or a share of them."""


def check_plugins(key: str, given: Sequence[object], kind: type) -> None:
    """Check the type of the callbacks or loggers that a program gives.

    Raises:
        UserError: one is of another type, such as the name that a config would have, or a subclass
            does not call the constructor that it overrides.
    """
    for one in given:
        if isinstance(one, str | Mapping):
            why = "names are for configs, a program gives the objects themselves"
            error = setting_error(f"trainer.{key}", f"of type {kind.__name__}", repr(one), why)
            raise UserError(f"{error} For example {EXAMPLES[key]}.")
        check_type(f"trainer.{key}", one, kind)
        check_made(one)


def check_root(root: object, run_dir: str | Path) -> None:
    """Refuse a directory beside the run's, where some files of the run would be.

    Raises:
        UserError: ``default_root_dir`` is not the run's directory.
    """
    if root is not None and Path(str(root)).absolute() != Path(run_dir).absolute():
        raise UserError(
            f"trainer.default_root_dir must be null, got {root} (all files of a run are in its "
            "run_dir). Set run_dir."
        )


def refuse_float16(precision: object) -> None:
    """Refuse float16 before the trainer is made: on a CPU, Lightning would silently use bfloat16.

    Raises:
        UserError: the precision is one with float16.
    """
    if str(precision) in ("16", "16-mixed", "16-true", "transformer-engine-float16"):
        raise setting_error(
            "trainer.precision",
            "32-true or bf16-mixed",
            precision,
            "float16 gradients would be clipped before they are unscaled",
        )


def refuse_missing_gpu(accelerator: object) -> None:
    """Refuse a GPU on a machine without one; Lightning's message would not say what to set.

    Raises:
        UserError: torch finds none.
    """
    has_other = accelerator == "gpu" and MPSAccelerator.is_available()
    if accelerator in ("gpu", "cuda") and not (has_other or torch.cuda.is_available()):
        raise UserError(NO_GPU)


@contextmanager
def rewording_notebook_error(settings: Mapping[str, Any]) -> Iterator[None]:
    """Reword Lightning's refusal of several devices in a notebook: it names what is refused here.

    Raises:
        UserError: the program is a notebook or a Python prompt, and more than one process was
            asked for.
    """
    try:
        yield
    except MisconfigurationException as error:
        if "interactive environment" not in str(error):
            raise
        asked = ", ".join(f"{name}={settings[name]!r}" for name in _PROCESSES if name in settings)
        raise UserError(
            f"a notebook and a Python prompt train with one process, got {asked} (other processes "
            "are started by running the program again). Save the program in a file and run it with "
            "python or torchrun; or set devices to 1 and leave strategy out."
        ) from None


def as_wrong_interval(error: BaseException) -> UserError | None:
    """Return Lightning's error about an interval that is longer than an epoch as a user's."""
    found = re.search(r"`val_check_interval` \((.+)\) must be .* batches \((.+)\)\.", str(error))
    if found is None:
        return None
    rule, why = f"at most {found[2]}", "the steps of an epoch"
    reworded = setting_error("trainer.val_check_interval", rule, found[1], why)
    advice = "To count steps across epochs, set trainer.check_val_every_n_epoch to null."
    return UserError(f"{reworded} {advice}")


def check_max_time(max_time: object) -> None:
    """Check the form of a time limit; Lightning would not name its key.

    Raises:
        UserError: it is not a text as ``DD:HH:MM:SS``.
    """
    is_other = max_time is None or isinstance(max_time, dict | timedelta)
    if not is_other and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", str(max_time).strip()):
        rule = "days, hours, minutes and seconds as 'DD:HH:MM:SS'"
        error = setting_error("trainer.max_time", rule, max_time)
        raise UserError(f"{error} One hour is '00:01:00:00'.")


def check_counts(settings: Mapping[str, Any]) -> None:
    """Check the ranges of counts, some of which Lightning accepts or rejects only later.

    Args:
        settings: Arguments of Lightning's trainer; those that are missing have its defaults.

    Raises:
        UserError: one is out of range.
    """
    for name, least in _MINIMA.items():
        why = "-1 sets no limit" if least < 0 else ""
        check_range(f"trainer.{name}", settings.get(name), at_least=least, why=why)
    if not isinstance(batches := settings.get("fast_dev_run"), bool):
        check_range("trainer.fast_dev_run", batches, at_least=0)
    for name in _BATCH_LIMITS:
        value = settings.get(name)
        check_range(f"trainer.{name}", value, at_least=0)
        if value is not None and value > 1 and value % 1:
            rule, why = "a whole number, or from 0.0 to 1.0", "a number of batches, or their share"
            raise setting_error(f"trainer.{name}", rule, value, why)
    devices = settings.get("devices", 1)
    if re.fullmatch(r"-?\d*\.\d*", str(devices)):
        rule = "auto, or the number of devices from 1 on"
        raise setting_error("trainer.devices", rule, devices)


def refuse_barebones(barebones: object) -> None:
    """Refuse Lightning's mode without logging and checkpoints.

    Raises:
        UserError: it is on.
    """
    if barebones:
        why = "a run always logs, and keeps checkpoints"
        raise setting_error("trainer.barebones", "false", barebones, why)


def check_intervals(val_check_interval: object, check_val_every_n_epoch: object) -> None:
    """Check how often a run validates; Lightning would not name key and unit.

    Raises:
        UserError: an interval is not positive, or a fraction of something that has no end.
    """
    if not isinstance(val_check_interval, (int, float)):
        return
    is_fraction = isinstance(val_check_interval, float)
    if check_val_every_n_epoch is None and (is_fraction or val_check_interval < 1):
        rule = "a whole number >= 1, or a time as 'DD:HH:MM:SS'"
        why = "with check_val_every_n_epoch: null it counts steps, across epochs"
    elif not 0 < val_check_interval <= (1.0 if is_fraction else math.inf):
        rule = "a whole number >= 1, a fraction above 0 and up to 1.0, or a time as 'DD:HH:MM:SS'"
        why = "a whole number counts the steps in an epoch, and 0.5 is half an epoch"
    else:
        return
    raise setting_error("trainer.val_check_interval", rule, val_check_interval, why)


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
    check_made(datamodule)


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
    check_made(model)
