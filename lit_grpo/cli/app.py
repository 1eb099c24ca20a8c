"""The commands that train and measure, on LightningCLI: one flat set of keys a command.

Says where files go and how a run starts and ends; what happens in between is Lightning's and the
modules' affair.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf.errors import OmegaConfBaseException
from transformers.utils.logging import disable_progress_bar

import lit_grpo.data  # noqa: F401 - makes its short class names known, as the imports below do
from lit_grpo import __version__
from lit_grpo.cli.configs import Invocation, look_at
from lit_grpo.cli.environment import override, tell_overridden
from lit_grpo.cli.errors import (
    broken_import,
    complain,
    constructor_error,
    explain,
    explain_interpolation,
    quote,
)
from lit_grpo.cli.measure import MEASURES, add_options, measure, one_device, with_run
from lit_grpo.cli.run_dir import TRAINING, choose_run_dir, find_checkpoint, refuse_used
from lit_grpo.rollout import EngineFailed
from lit_grpo.runs.files import CompletionsFile, FinalModel, MetricsFile, open_run_log
from lit_grpo.stopping import ENGINE_EXIT_CODE
from lit_grpo.training import GRPOModule, SFTModule
from lit_grpo.training.base import PolicyModule
from lit_grpo.types import UserError

log = logging.getLogger(__name__)

TRAINER_DEFAULTS = {
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "max_epochs": -1,  # a run without an end is then refused; Lightning would make it 1000
    "num_sanity_val_steps": 0,
}
USER_ERRORS = (ValueError, OSError, ImportError, MisconfigurationException)
CHATTER = [
    "You have overridden `transfer_batch_to_device`",
    "torch.distributed.nn.functional.all_gather is deprecated",
    "does not have many workers",
    "`isinstance.treespec, LeafSpec.` is deprecated",
    "Checkpoint directory .* exists and is not empty",
]


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs one of the commands and returns the exit code of the process.

    Raises:
        KeyboardInterrupt: Ctrl-C, wherever it came.
    """
    sys.path.insert(0, os.getcwd())  # for plugins beside the config
    silence_chatter()
    import_plugins()
    try:
        invocation = look_at(with_run(arguments) if command == "rescore" else arguments)
        with choose_run_dir(command, invocation) as run_dir:
            return CommandLine(command, invocation, run_dir).execute()
    except SystemExit as leave:
        if isinstance(leave.__context__, KeyboardInterrupt):  # Lightning made exit code 1 of it
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        return report_error(error)


class Parser(LightningArgumentParser):
    """Words its errors in one line; the parsers of nested classes hand theirs to the outer one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        line = explain(self, message, ex)
        if self.exit_on_error:
            raise UserError(line) from ex
        raise argparse.ArgumentError(None, quote(line)) from ex

    def dump(self, cfg: Any, **kwargs: Any) -> str:
        """The config as it would run: --print_config comes before anything could override it."""
        cfg = cfg.clone()
        override(cfg)
        return super().dump(cfg, **kwargs)


class CommandLine(LightningCLI):
    """Everything that one command was told, parsed and made."""

    def __init__(self, command: str, invocation: Invocation, run_dir: str) -> None:
        self.command = command
        self.trains = command in TRAINING
        self.config_name = invocation.name
        self.default_run_dir = run_dir
        super().__init__(
            model_class=choose_model(command, invocation),
            datamodule_class=LightningDataModule,
            subclass_mode_model=invocation.has_model_class,
            subclass_mode_data=True,
            save_config_callback=None,  # _start_run saves it
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            parser_class=Parser,
            parser_kwargs={
                "prog": f"lit-grpo {command}",
                "description": "Every key can stand in a config file too.",
                "parser_mode": "omegaconf+",
                "allow_abbrev": False,
                "dump_header": [f"lit-grpo=={__version__}"],
            },
            args=list(invocation.arguments),
            # Without Lightning's subcommands interpolations need no `fit.` in front, and the
            # hyper-parameters in a checkpoint never override what the user says now.
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_dir", type=str, default=self.default_run_dir, help="Where all files go."
        )
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            help="A checkpoint to go on from, or `last` for the last one in run_dir.",
        )
        add_options(parser, self.command)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except OmegaConfBaseException as error:
            raise UserError(explain_interpolation(parser, error)) from error
        except Exception as error:
            line = broken_import(error)
            if line is None:
                raise
            raise UserError(line) from error

    def before_instantiate_classes(self) -> None:
        self.overridden = override(self.config)
        run_dir = Path(self.config.run_dir)
        if self.config.ckpt_path is not None:
            self.config.ckpt_path = find_checkpoint(self.config.ckpt_path, run_dir)
        elif self.trains and rank() == 0:
            refuse_used(run_dir)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Adds what every training writes; measuring writes nothing."""
        given, run_dir = self.config_init.trainer, self.config.run_dir
        kwargs["default_root_dir"] = given.default_root_dir or run_dir
        if self.command in MEASURES:
            kwargs |= one_device(given)
        if not self.trains:
            return super().instantiate_trainer(logger=False, **kwargs)
        return super().instantiate_trainer(
            logger=[MetricsFile(run_dir), *as_list(given.logger)],
            callbacks=[*as_list(given.callbacks), CompletionsFile(run_dir), FinalModel(run_dir)],
            **kwargs,
        )

    def execute(self) -> int:
        """Trains or measures, and returns the exit code."""
        try:
            if self.trains:
                return self._train()
            tell_overridden(self.overridden)
            if self.command in MEASURES:
                return measure(self)
            getattr(self.trainer, self.command)(**self._what())
            return 0
        finally:
            if isinstance(self.model, PolicyModule):
                self.model.close()

    def _train(self) -> int:
        run_log = self._start_run(Path(self.config.run_dir))
        try:
            self.trainer.fit(**self._what())
        except Exception:
            log_exception(run_log)
            raise
        reason = getattr(self.trainer, "stop_reason", None)
        if reason is None:
            rank_zero_only(log.info)("%s", how_it_ended(self.trainer))
            return 0
        if rank() > 0:
            return 0  # Lightning kills rank 0 when a rank that it started fails before it has ended
        print(reason.message, file=sys.stderr)
        return reason.exit_code

    def _what(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "datamodule": self.datamodule,
            "ckpt_path": self.config.ckpt_path,
        }

    def _start_run(self, run_dir: Path) -> logging.Handler:
        run_dir.mkdir(parents=True, exist_ok=True)
        if rank() == 0:
            config = self.config.clone()
            config.ckpt_path = None  # the config says what is run, not where it went on from
            path = run_dir / "config.yaml"
            self.parser.save(config, path, skip_unset=False, overwrite=True, multifile=False)
        run_log = open_run_log(run_dir, rank())
        rank_zero_only(log.info)("run directory: %s", run_dir)
        tell_overridden(self.overridden)
        return run_log


def choose_model(command: str, invocation: Invocation) -> type[LightningModule]:
    """What is measured may be a warm-up too."""
    return SFTModule if command == "sft" or invocation.is_warm_up else GRPOModule


def how_it_ended(trainer: Trainer) -> str:
    """Why training ended that no callback of ours has ended, in one line."""
    step = f"after optimizer step {trainer.global_step}"
    if 0 < trainer.max_steps <= trainer.global_step:
        return f"done {step}: max_steps is reached"
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    told = (getattr(one, "stopping_reason_message", None) for one in callbacks)
    if reason := next(filter(None, told), None):
        return f"ended {step}: {reason}"
    if trainer.should_stop:
        return f"ended {step}: a callback asked for it, or max_time is up"
    return f"done {step}: max_epochs is reached"


def rank() -> int:
    """The rank of this process, known before there is a trainer."""
    return getattr(rank_zero_only, "rank", 0)


def log_exception(run_log: logging.Handler) -> None:
    """Writes the traceback to the file alone, whatever the terminal will show."""
    message = "the run ended with an exception"
    details = (log.name, logging.ERROR, __file__, 0, message, (), sys.exc_info())
    run_log.handle(log.makeRecord(*details))


def as_list(value: Any) -> list[Any]:
    """What a trainer argument lists, one thing, or nothing (null, true, false)."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def silence_chatter() -> None:
    """Tips, lists of hardware, bars for moments, and warnings of what is meant to be so."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in CHATTER:
        warnings.filterwarnings("ignore", f".*{message}")
    disable_progress_bar()


def import_plugins() -> None:
    """Makes the classes of installed packages, and the callbacks that ship, known by name."""
    for plugin in entry_points(group="lit_grpo.plugins"):
        try:
            plugin.load()
        except Exception as error:
            reason = broken_import(error) or error
            print(f"warning: plugin {plugin.value} is left out: {reason}", file=sys.stderr)


def report_error(error: Exception) -> int:
    """One line and exit code 2 for what a user can put right, the engine's last words and 5 where
    it gave up, a traceback and 1 for the rest."""
    error = constructor_error(error)
    if isinstance(error, EngineFailed):
        return complain(str(error), exit_code=ENGINE_EXIT_CODE)
    if is_for_user(error):
        return complain(str(error))
    traceback.print_exception(error)
    return 1


def is_for_user(error: Exception) -> bool:
    """Whether the config or the data is wrong, not the program.

    A ``UserError`` always is one. Before training so is what libraries raise of a bad path, class
    or value; during training that is a crash.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_training = any(frame.name == "_run_stage" for frame in frames)
    return isinstance(error, UserError if is_training else USER_ERRORS)
