"""The commands that train and measure, on LightningCLI: one flat set of keys a command.

Says where files go and how a run starts and ends; what happens in between is Lightning's and the
modules' affair.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
from lit_grpo.cli_configs import Invocation, look_at
from lit_grpo.cli_errors import (
    broken_import,
    complain,
    constructor_error,
    explain,
    explain_interpolation,
    quote,
)
from lit_grpo.module import GRPOModule
from lit_grpo.run_directory import (
    CompletionsFile,
    FinalModel,
    MetricsFile,
    last_checkpoint,
    next_run_dir,
    open_run_log,
)
from lit_grpo.sft import SFTModule

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
MODELS: dict[str, type[LightningModule]] = {
    "sft": SFTModule,
    "fit": GRPOModule,
    "validate": GRPOModule,
    "test": GRPOModule,
}
TRAINING = ("sft", "fit")
TRAINER_DEFAULTS = {
    "default_root_dir": "${run_dir}",
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "max_epochs": -1,
    "num_sanity_val_steps": 0,
}
USER_ERRORS = (ValueError, OSError, ImportError, MisconfigurationException)
CHATTER = [
    "You have overridden `transfer_batch_to_device`",
    "does not have many workers",
    "`isinstance.treespec, LeafSpec.` is deprecated",
    "Checkpoint directory .* exists and is not empty",
]
RUN_DIR_VARIABLE = "LIT_GRPO_RUN_DIR"
SHUTDOWN_SECONDS = 15.0


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs one of the commands and returns the exit code of the process."""
    sys.path.insert(0, os.getcwd())  # for plugins beside the config
    silence_chatter()
    import_plugins()
    try:
        invocation = look_at(arguments)
        with choose_run_dir(command, invocation) as run_dir:
            exit_code = CommandLine(command, invocation, run_dir).execute()
    except (KeyboardInterrupt, SystemExit) as leave:
        # Lightning turns Ctrl-C during training into exit code 1.
        if not isinstance(leave.__context__ or leave, KeyboardInterrupt):
            raise
        exit_code = complain("interrupted.", exit_code=130)
    except Exception as error:
        exit_code = report_error(error)
    end_within(SHUTDOWN_SECONDS, exit_code)
    return exit_code


class Parser(LightningArgumentParser):
    """Words its errors in one line; the parsers of nested classes hand theirs to the outer one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        line = explain(self, message, ex)
        if self.exit_on_error:
            raise ValueError(line) from ex
        raise argparse.ArgumentError(None, quote(line)) from ex


class CommandLine(LightningCLI):
    """Everything that one command was told, parsed and made."""

    def __init__(self, command: str, invocation: Invocation, run_dir: str) -> None:
        self.command = command
        self.trains = command in TRAINING
        self.default_run_dir = run_dir
        super().__init__(
            model_class=MODELS[command],
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

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except OmegaConfBaseException as error:
            raise ValueError(explain_interpolation(parser, error)) from error
        except Exception as error:
            line = broken_import(error)
            if line is None:
                raise
            raise ValueError(line) from error

    def before_instantiate_classes(self) -> None:
        run_dir = Path(self.config.run_dir)
        if self.config.ckpt_path is not None:
            self.config.ckpt_path = find_checkpoint(self.config.ckpt_path, run_dir)
        elif self.trains and rank_zero_only.rank == 0:
            refuse_used(run_dir)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Adds what every training writes; measuring writes nothing."""
        if not self.trains:
            return super().instantiate_trainer(logger=False)
        given, run_dir = self.config_init.trainer, self.config.run_dir
        return super().instantiate_trainer(
            logger=[MetricsFile(run_dir), *as_list(given.logger)],
            callbacks=[*as_list(given.callbacks), CompletionsFile(run_dir), FinalModel(run_dir)],
        )

    def execute(self) -> int:
        """Trains or measures, and returns the exit code."""
        if not self.trains:
            getattr(self.trainer, self.command)(**self._what())
            return 0
        run_log = self._start_run(Path(self.config.run_dir))
        try:
            self.trainer.fit(**self._what())
        except Exception:
            log_exception(run_log)
            raise
        reason = getattr(self.trainer, "stop_reason", None)
        if reason is None:
            return 0
        rank_zero_only(print)(reason.message, file=sys.stderr)
        return reason.exit_code

    def _what(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "datamodule": self.datamodule,
            "ckpt_path": self.config.ckpt_path,
        }

    def _start_run(self, run_dir: Path) -> logging.Handler:
        run_dir.mkdir(parents=True, exist_ok=True)
        if rank_zero_only.rank == 0:
            config = self.config.clone()
            config.ckpt_path = None  # the config says what is run, not where it went on from
            path = run_dir / "config.yaml"
            self.parser.save(config, path, skip_unset=False, overwrite=True, multifile=False)
        return open_run_log(run_dir, rank_zero_only.rank)


def log_exception(run_log: logging.Handler) -> None:
    """Writes the traceback to the file alone, whatever the terminal will show."""
    message = "the run ended with an exception"
    details = (log.name, logging.ERROR, __file__, 0, message, (), sys.exc_info())
    run_log.handle(log.makeRecord(*details))


@contextmanager
def choose_run_dir(command: str, invocation: Invocation) -> Iterator[str]:
    """Yields the run directory where none is given, and takes it back when it was left empty."""
    runs = Path("runs") / (invocation.name or command)
    if invocation.run_dir is not None:
        yield invocation.run_dir
    elif "LOCAL_RANK" in os.environ:
        yield inherited_run_dir()
    elif invocation.ckpt_path == "last":
        yield str(latest_run_dir(runs))
    elif command not in TRAINING:
        yield str(runs)
    else:
        run_dir = next_run_dir(runs.parent, runs.name)
        os.environ[RUN_DIR_VARIABLE] = str(run_dir)
        try:
            yield str(run_dir)
        finally:
            with suppress(OSError):
                os.removedirs(run_dir)


def inherited_run_dir() -> str:
    """What rank 0 chose before it started this rank; each would choose another directory."""
    if RUN_DIR_VARIABLE not in os.environ:
        raise ValueError("ranks started from outside would each choose a run_dir. Set run_dir.")
    return os.environ[RUN_DIR_VARIABLE]


def latest_run_dir(runs: Path) -> Path:
    """The run with the highest number that has a checkpoint."""
    numbers = [
        int(path.name)
        for path in runs.glob("*")
        if path.name.isdecimal() and last_checkpoint(path) is not None
    ]
    if not numbers:
        raise ValueError(f"{runs} has no run with a checkpoint to go on from. Set run_dir.")
    return runs / str(max(numbers))


def find_checkpoint(name: str, run_dir: Path) -> str:
    """The path of a checkpoint, where ``last`` stands for the last one of the run."""
    path = last_checkpoint(run_dir) if name == "last" else name
    if path is None:
        raise ValueError(
            f"{run_dir} has no checkpoint to go on from. Leave --ckpt_path out to start afresh."
        )
    if "://" not in str(path) and not Path(path).exists():
        raise ValueError(f"{path}: no such checkpoint. Set ckpt_path to a file or to last.")
    return str(path)


def refuse_used(run_dir: Path) -> None:
    """Raises ValueError where another run has left what a fresh one would overwrite."""
    if (run_dir / "metrics.csv").exists() or any(run_dir.glob("checkpoints/*")):
        raise ValueError(
            f"{run_dir} holds a run already, which a fresh one would overwrite. Give --ckpt_path "
            "last to go on with it, or another --run_dir."
        )


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
    """One line and exit code 2 for what a user can put right, a traceback and 1 for the rest."""
    error = constructor_error(error)
    if is_for_user(error):
        return complain(str(error))
    traceback.print_exception(error)
    return 1


def is_for_user(error: Exception) -> bool:
    """Whether the config or the data is wrong: raised before training, or by this package."""
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == "_run_stage" for frame in frames):
        return isinstance(error, ValueError) and PACKAGE in Path(frames[-1].filename).parents
    return isinstance(error, USER_ERRORS)


def end_within(seconds: float, exit_code: int) -> None:
    """Ends the process with its exit code even if a thread or a logger hangs in its shutdown."""

    def watch() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        os._exit(exit_code)

    sys.stdout.flush()
    threading.Thread(target=watch, daemon=True).start()
