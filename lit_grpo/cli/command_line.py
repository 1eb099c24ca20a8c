"""Build objects from arguments and config files with LightningCLI.

Each command has one flat set of keys. The trainer, the model and the data are made here; `app` runs
them.
"""

from __future__ import annotations

import math
import os
import shlex
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from omegaconf.errors import OmegaConfBaseException

import lit_grpo.data  # noqa: F401 - defines classes that configs name; so do the imports below
from lit_grpo import __version__
from lit_grpo.cli.commands import (
    CHECKING,
    EVALUATING,
    PLANNING,
    REWARD_COMMANDS,
    TRAINING,
    WITHOUT_CONFIG,
    describe,
    usage,
)
from lit_grpo.cli.errors import broken_import
from lit_grpo.cli.options import OPTIONS
from lit_grpo.cli.parsing.config_changes import (
    Change,
    find_changes,
    refuse_changes,
    refuse_seed_alone,
)
from lit_grpo.cli.parsing.environment import override
from lit_grpo.cli.parsing.invocation import Invocation
from lit_grpo.cli.parsing.list_items import refuse_other_items
from lit_grpo.cli.parsing.parser import HelpFormatter, Parser
from lit_grpo.cli.parsing.parser_errors import explain_interpolation
from lit_grpo.cli.parsing.paths import follow_run_dir
from lit_grpo.cli.parsing.reward_functions import take_functions
from lit_grpo.cli.parsing.training_kind import choose_model
from lit_grpo.cli.parsing.untyped import refuse_missing
from lit_grpo.distributed.supported import supported_strategy
from lit_grpo.runs.checkpoints.resume import find_checkpoint
from lit_grpo.runs.checkpoints.resume_checks import check_checkpoint_fits, check_run_dir_is_new
from lit_grpo.runs.files.config import ConfigFile, run_of
from lit_grpo.runs.run_callbacks import (
    as_list,
    has_lightnings_checkpoints,
    run_callbacks,
    run_loggers,
    with_progress_bar,
)
from lit_grpo.runs.trainer_settings import (
    TRAINER_DEFAULTS,
    check_counts,
    check_intervals,
    check_max_time,
    check_root,
    refuse_barebones,
    refuse_float16,
)
from lit_grpo.training import GRPOModule
from lit_grpo.types import UserError, check_range, setting_error
from lit_grpo.types.overrides import check_made


class CommandLine(LightningCLI):
    """The parsed config of one command, and the trainer, model and data made from it."""

    def __init__(self, command: str, invocation: Invocation, run_dir: str) -> None:
        self.command = command
        self.config_name = invocation.name
        self.default_run_dir = run_dir
        self._invocation = invocation
        self._model_class = choose_model(command, invocation)
        self.changes: list[Change] = []
        """How the config differs from the resumed run's."""
        super().__init__(
            model_class=self._model_class,
            datamodule_class=LightningDataModule,
            subclass_mode_model=invocation.has_model_class,
            subclass_mode_data=True,
            save_config_callback=None,  # `ConfigFile` saves it
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={
                "prog": f"lit-grpo {command}",
                "usage": usage(command),
                "description": describe(command),
                "formatter_class": HelpFormatter,
                "parser_mode": "omegaconf+",
                "allow_abbrev": False,
                "dump_header": [f"lit-grpo=={__version__}"],
            },
            args=list(invocation.arguments),
            # Without Lightning's subcommands interpolations need no `fit.` in front, and the
            # hyper-parameters in a checkpoint never override the config.
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        take_functions(parser)
        parser.add_argument(
            "--run_dir", type=str, default=self.default_run_dir, help="Directory of all files."
        )
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            help="Checkpoint to resume from: a path, `last` for the newest one in run_dir, `auto` "
            "for that one if there is any, or `best` for the best by a callback's monitor.",
        )
        parser.add_argument(
            "--allow_changes",
            action="store_true",
            help="Resume with settings that make it a different run from here on.",
        )
        parser.add_argument(
            "--leave_by",
            type=str,
            default="auto",
            help="When a training run must be over, with a checkpoint: a time such as "
            "2026-11-24T08:00, `never`, or `auto` for the end of the SLURM job, if there is one.",
        )
        parser.add_argument(
            "--requeue",
            action="store_true",
            help="Queue the SLURM job again if its end, or SIGUSR1, ended the training.",
        )
        for name, settings in self._options.items():
            parser.add_argument(name, **settings)

    @property
    def _options(self) -> dict[str, dict[str, Any]]:
        """The command's options that it does not parse itself."""
        return {} if self.command in WITHOUT_CONFIG else OPTIONS.get(self.command, {})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        refuse_other_items(parser, self._invocation)
        cast(Parser, parser).unseeded = tuple({"model", "data"} - self._invocation.seeded)
        try:
            self.config = parser.parse_args(args)
            refuse_bad_seed(self.config.seed_everything)
        except OmegaConfBaseException as error:
            raise UserError(explain_interpolation(parser, error)) from error
        except Exception as error:
            line = broken_import(error)
            if line is None:
                raise
            raise UserError(line) from error

    def before_instantiate_classes(self) -> None:
        self.overridden = override(self.config)
        refuse_missing(self.config)
        refuse_learning_rate(self.config.get("model.optimizer.init_args.lr"))
        run_dir = Path(self.config.run_dir)
        given = self.config.ckpt_path
        if given is None and self.command in TRAINING and process_rank() == 0:
            check_run_dir_is_new(run_dir, self.resume_command)
        elif given is not None:
            is_evaluated = self.command in EVALUATING
            self.config.ckpt_path = find_checkpoint(given, run_dir, is_evaluated=is_evaluated)
        if self.config.ckpt_path is not None:
            self._check_checkpoint(self.config.ckpt_path)

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        for part in (self.model, self.datamodule):
            check_made(part)

    def _check_checkpoint(self, path: str) -> None:
        """Check that this training can resume from, or be evaluated at, a checkpoint."""
        is_grpo, trainer = self._model_class is GRPOModule, self.config.trainer
        if self.command not in TRAINING:
            check_checkpoint_fits(path, is_grpo=is_grpo)
            self.changes = self._changes_since(run_of(path))
            return
        check_checkpoint_fits(
            path, is_grpo=is_grpo, max_steps=trainer.max_steps, max_epochs=trainer.max_epochs
        )
        self._compare_with(run_of(path))

    def _compare_with(self, resumed: Path) -> None:
        """Find what differs from the config of the resumed run, and refuse what may not."""
        self.changes = self._changes_since(resumed)
        if not self.config.allow_changes:
            refuse_changes(resumed, self.changes, self._command_with(str(resumed)))
        refuse_seed_alone(self.changes)

    def _changes_since(self, run_dir: Path) -> list[Change]:
        saved = run_dir / "config.yaml"
        return find_changes(saved.read_text(), self.saved_config) if saved.is_file() else []

    @property
    def resume_command(self) -> str:
        """The command that resumes this run with its own settings."""
        return self._command_with(self.config.run_dir)

    def _command_with(self, run_dir: str) -> str:
        return f"lit-grpo {self.command} {shlex.quote(run_dir)}"

    @cached_property
    def saved_config(self) -> str:
        """The config as YAML, without what only concerns how this process starts.

        The trainer's paths in the run directory follow it, when the run is moved or repeated.
        """
        config = self.config.clone()
        config.ckpt_path, config.allow_changes = None, False
        config.leave_by, config.requeue = "auto", False
        config.trainer = follow_run_dir(config.trainer, config.run_dir)
        return str(self.parser.dump(config, skip_unset=False, skip_validation=True))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the loggers and callbacks of a training run; other commands get none."""
        given, run_dir = self.config_init.trainer, self.config.run_dir
        for callback in as_list(given.callbacks):
            check_made(callback)
        supported_strategy(given.strategy)
        refuse_float16(given.precision)
        check_max_time(given.max_time)
        check_root(given.default_root_dir, run_dir)
        check_counts(vars(given))
        refuse_barebones(given.barebones)
        check_intervals(given.val_check_interval, given.check_val_every_n_epoch)
        kwargs["default_root_dir"] = os.path.abspath(run_dir)  # noqa: PTH100
        if self.command in (*REWARD_COMMANDS, *WITHOUT_CONFIG):
            return self.trainer_on_one_device()
        if self.command == PLANNING:
            return self.trainer_of_this_machine()
        if self.command not in (*TRAINING, CHECKING):
            shown = with_progress_bar(given.callbacks, given.enable_progress_bar)
            return super().instantiate_trainer(logger=False, callbacks=shown, **kwargs)
        kwargs["enable_checkpointing"] = has_lightnings_checkpoints(given.callbacks)
        loggers = run_loggers(run_dir, given.logger)
        return super().instantiate_trainer(
            logger=loggers,
            callbacks=[
                *run_callbacks(
                    run_dir,
                    given.callbacks,
                    loggers=loggers,
                    enable_progress_bar=given.enable_progress_bar,
                    enable_checkpointing=given.enable_checkpointing,
                    leave_by=self.config.leave_by,
                    requeue=self.config.requeue,
                ),
                ConfigFile(run_dir, self.saved_config),
            ],
            **kwargs,
        )

    def trainer_on_one_device(self) -> Trainer:
        """Return a trainer for a trial on the first device of the config, which writes no files."""
        given = self.config_init.trainer
        trainer: Trainer = super().instantiate_trainer(
            logger=False,
            default_root_dir=self.config.run_dir,
            **_one_device(given),
        )
        return trainer

    def trainer_of_this_machine(self) -> Trainer:
        """Return a trainer that any machine can make, whatever devices the config asks for."""
        trainer: Trainer = super().instantiate_trainer(
            logger=False,
            default_root_dir=self.config.run_dir,
            accelerator="cpu",
            devices=1,
            num_nodes=1,
            strategy="auto",
            precision="32-true",
        )
        return trainer

    @property
    def fit_arguments(self) -> dict[str, Any]:
        """Arguments of ``Trainer.fit``, ``validate`` and ``test``."""
        return {
            "model": self.model,
            "datamodule": self.datamodule,
            "ckpt_path": self.config.ckpt_path,
        }


def refuse_bad_seed(seed: bool | int) -> None:
    """Check the seed of a run, since Lightning also accepts true and false.

    Raises:
        UserError: it is not a number of at least 0.
    """
    if isinstance(seed, bool):
        rule, why = "a whole number >= 0", "true and false would count as the numbers 1 and 0"
        raise setting_error("seed_everything", rule, str(seed).lower(), why)
    check_range("seed_everything", seed, at_least=0)


def refuse_learning_rate(lr: object) -> None:
    """Check the learning rate before a model is loaded; an optimizer may take 0 and train nothing.

    Raises:
        UserError: it is not positive.
    """
    if isinstance(lr, int | float) and not 0 < lr < math.inf:
        raise setting_error("model.optimizer.lr", "a positive number", lr)


def process_rank() -> int:
    """Return the rank of this process, which is known before there is a trainer.

    On machines other than the first, it may still be the rank within the machine.
    """
    rank = getattr(rank_zero_only, "rank", 0)
    return int(rank or os.environ.get("NODE_RANK", 0))


def _one_device(trainer: Any) -> dict[str, Any]:
    """Return settings for the first of the devices that the config of a trainer names."""
    devices = trainer.devices
    if isinstance(devices, str) and "," in devices:
        devices = [int(index) for index in devices.split(",") if index]
    return {
        "devices": devices[:1] if isinstance(devices, list) else 1,
        "num_nodes": 1,
        "strategy": "auto",
    }
