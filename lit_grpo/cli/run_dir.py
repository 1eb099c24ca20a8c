"""Choose the directory of a run: the given one, the next free number, or the latest run's."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lit_grpo.cli.commands import RESUMING, TRAINING
from lit_grpo.cli.parsing.invocation import Invocation, last_value
from lit_grpo.runs.checkpoints.files import last_checkpoint
from lit_grpo.runs.checkpoints.resume import BEST
from lit_grpo.runs.files.config import run_of, similar_run
from lit_grpo.runs.files.event_log import read_events
from lit_grpo.runs.files.log import not_writable
from lit_grpo.types import UserError
from lit_grpo.types.paths import at_home, refuse_unreadable
from lit_grpo.types.settings import list_some

_MISSING = re.compile(r"no such (file|dir)|no module named|looked (for|in)", re.IGNORECASE)
"""Words of errors about a missing file or module."""
_IN_PYTHON = {
    "fit": "Go on in Python: its script, with ckpt_path='last'.",
    "sft": "Go on in Python: its script, with ckpt_path='last'.",
    "validate": "In its script call trainer.validate(module, data, ckpt_path='last').",
    "test": "In its script call trainer.test(module, data, ckpt_path='last').",
    "rewards": "Call the reward in Python on a few completions: see docs/guides/reward.md.",
    "rescore": "Call the reward in Python on rows of its completions: see docs/guides/reward.md.",
}
"""Command -> what to do with a run that was made in Python."""
_NOT_IN_PYTHON = "This command needs the config: report, checkpoints and analyze do not."
RUN_DIR_VARIABLE = "LIT_GRPO_RUN_DIR"
"""Environment variable with the directory that rank 0 chose, for the ranks that it launches."""


def with_run(command: str, arguments: Sequence[str]) -> Sequence[str]:
    """Replace a leading RUN with the config, the directory and the last checkpoint of that run.

    Raises:
        UserError: RUN is not the directory of a run, or ``rescore`` got none.
    """
    run_dir = at_home(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    if run_dir is None:
        if command == "rescore":
            raise UserError(
                "rescore needs the directory of a run first: lit-grpo rescore runs/my/0"
            )
        return arguments
    config = Path(run_dir) / "config.yaml"
    refuse_unreadable(config)
    is_checkpoint = Path(run_dir).parent.name == "checkpoints" and not config.is_file()
    if is_checkpoint and (run_of(run_dir) / "config.yaml").is_file():
        raise UserError(
            f"{run_dir}: expected the directory of a run, got its checkpoint. Use "
            f"{run_of(run_dir)} --ckpt_path {run_dir}."
        )
    if Path(run_dir).is_file():
        raise UserError(f"{run_dir}: expected the directory of a run. Use --config {run_dir}.")
    if not config.is_file():
        if (Path(run_dir) / "metrics.csv").is_file():
            raise UserError(
                f"{run_dir}: expected a run of the command line, got one without config.yaml (runs "
                f"made in Python have none). {_IN_PYTHON.get(command, _NOT_IN_PYTHON)}"
            )
        hint = similar_run(Path(run_dir))
        if inside := sorted(str(one.parent) for one in Path(run_dir).glob("*/config.yaml")):
            hint = f" Did you mean {list_some(inside, 3)}?"
        elif (Path(run_dir) / "run.log").is_file():
            hint = " It ended before its training began: start it again as before."
        what = "not that of a run" if Path(run_dir).is_dir() else "no such run directory"
        raise UserError(f"{run_dir}: {what} (it has no config.yaml).{hint}")
    _refuse_other_run_dir(command, run_dir, arguments[1:])
    resume = ["--ckpt_path", "last"] if command in RESUMING else []
    return ["--config", str(config), *resume, *arguments[1:], "--run_dir", run_dir]


def _refuse_other_run_dir(command: str, run_dir: str, arguments: Sequence[str]) -> None:
    """Refuse another ``--run_dir`` next to RUN, where it would be ignored."""
    given = last_value("run_dir", [], arguments)
    if given is None or Path(given).absolute() == Path(run_dir).absolute():
        return
    config, last = f"{run_dir}/config.yaml", f"{run_dir}/checkpoints/last.ckpt"
    new = shlex.join(["--config", config, "--run_dir", given])
    again = (
        f" For a new run: lit-grpo {command} {new}; to go on from this one there, add --ckpt_path "
        f"{shlex.quote(last)}."
    )
    raise UserError(
        f"--run_dir must be left out beside a run (lit-grpo {command} {run_dir} writes there), got "
        f"{given}.{again if command in TRAINING else ''}"
    )


def where_started(command: str, arguments: Sequence[str], error: str) -> str:
    """Return how to resume a leading RUN that was started in another working directory.

    Empty for any other command line, and unless what the error misses may be in that directory.
    """
    if not arguments or arguments[0].startswith("-"):
        return ""
    run_dir = Path(at_home(arguments[0])).resolve()
    places = [one.directory for one in read_events(run_dir) if one.directory]
    if not places or Path(places[-1]) == Path.cwd():
        return ""
    place = Path(places[-1])
    if not _may_be_there(error, place):
        return ""
    shown = run_dir.relative_to(place) if run_dir.is_relative_to(place) else run_dir
    words = shlex.join([str(shown), *map(_from_anywhere, arguments[1:])])
    where = f"cd {shlex.quote(str(place))} && " if place.is_dir() else "where they are: "
    return (
        f" The run was last started in {place}. If one of its modules or files is missing here, go "
        f"on with: {where}lit-grpo {command} {words}"
    )


def _from_anywhere(argument: str) -> str:
    """Return an argument with the file that it names as an absolute path."""
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).absolute()}" if Path(value).is_file() else argument


def _may_be_there(error: str, place: Path) -> bool:
    """Return whether an error is about a file or module that a relative name finds in a directory.

    A directory that is gone, such as on another machine, may have had anything.
    """
    if not _MISSING.search(error):
        return False
    named = {*re.findall(r"'([^']+)'", error), *re.findall(r"[\w./-]+", error)}
    packages = {one.partition(".")[0] for one in named}
    paths = {one.rstrip(".") for one in named} | packages | {f"{one}.py" for one in packages}
    relative = [one for one in paths if one and not Path(one).is_absolute()]
    return not place.is_dir() or any(
        (place / one).exists() and not Path(one).exists() for one in relative
    )


@contextmanager
def choose_run_dir(command: str, invocation: Invocation) -> Iterator[str]:
    """Yield the given run directory, or a new one, which is removed if a wrong setting ends the run
    before its first step.
    """
    if invocation.run_dir is not None:
        yield invocation.run_dir
    elif is_launched():
        yield _inherited_run_dir()
    else:
        run_dir = _new_or_latest(command, invocation)
        os.environ[RUN_DIR_VARIABLE] = str(run_dir)
        try:
            yield str(run_dir)
        except UserError:
            _discard_unused(run_dir)
            raise
        finally:
            with suppress(OSError):
                os.removedirs(run_dir)


def is_launched() -> bool:
    """Return whether a launcher starts the ranks: torchrun, SLURM, a user on each machine.

    The ranks that Lightning's rank 0 starts also count.
    """
    in_slurm = SLURMEnvironment.detect() and int(os.environ["SLURM_NTASKS"]) > 1
    return in_slurm or any(name in os.environ for name in ("LOCAL_RANK", "NODE_RANK"))


def _discard_unused(run_dir: Path) -> None:
    """Remove what a run has written that failed before its first step."""
    written = [path.name for path in run_dir.glob("*")]
    if all(re.fullmatch(r"config\.yaml|run.*\.log", name) for name in written):
        for name in written:
            (run_dir / name).unlink()


def _new_or_latest(command: str, invocation: Invocation) -> Path:
    runs = Path("runs") / (invocation.name or command)
    if invocation.ckpt_path in ("last", BEST):
        return _latest_run_dir(runs)
    return next_run_dir(runs.parent, runs.name) if command in TRAINING else runs


def next_run_dir(root: str | Path, name: str) -> Path:
    """Create ``root/name/version`` with the next free number and return it.

    Raises:
        UserError: it cannot be made.
    """
    parent = Path(root) / name
    try:
        return _make_next(parent)
    except OSError as error:
        raise not_writable(parent, error) from error


def _make_next(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    taken = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
    version = max(taken, default=-1) + 1
    while True:
        try:
            (parent / str(version)).mkdir()
        except FileExistsError:  # another run started at the same moment
            version += 1
        else:
            return parent / str(version)


def _inherited_run_dir() -> str:
    if RUN_DIR_VARIABLE not in os.environ:
        raise UserError(
            "run_dir must be set if a launcher starts the ranks (each would choose a different "
            "directory). Set run_dir."
        )
    return os.environ[RUN_DIR_VARIABLE]


def _latest_run_dir(runs: Path) -> Path:
    """Return the run with the highest number among those with a checkpoint."""
    numbers = [
        int(path.name)
        for path in runs.glob("*")
        if path.name.isdecimal() and last_checkpoint(path) is not None
    ]
    if not numbers:
        raise UserError(f"{runs} has no run with a checkpoint to resume from. Set run_dir.")
    return runs / str(max(numbers))
