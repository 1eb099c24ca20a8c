"""``run.log``: the log messages and warnings of a run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from lit_grpo.runs.files.writable import try_writing
from lit_grpo.types import UserError
from lit_grpo.types.paths import shown_path

log = logging.getLogger(__name__)

LOGGED = ("lit_grpo", "lightning.pytorch", "lightning.fabric", "py.warnings")


def open_run_log(run_dir: str | Path, rank: int = 0) -> logging.Handler:
    """Write messages of this project and Lightning, and Python warnings, to ``run.log`` as well.

    They still go to the terminal. Ranks above 0 write ``run_rank1.log`` and so on.
    """
    path = Path(run_dir) / ("run.log" if rank == 0 else f"run_rank{rank}.log")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try_writing(path.parent)  # the log of an earlier part may be writable where it is not
        handler = _RunLog(path)
    except OSError as error:
        raise not_writable(shown_path(Path(run_dir)), error) from error
    handler.setFormatter(_WithTraceback("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.captureWarnings(True)
    log_to_terminal()
    for name in LOGGED:
        logging.getLogger(name).addHandler(handler)
    return handler


def not_writable(run_dir: str | Path, error: OSError) -> UserError:
    """Return the error of a run directory that cannot be made or written."""
    why, fix = error.strerror, "Set another run_dir, or make this one writable."
    if isinstance(error, FileExistsError | NotADirectoryError):
        why, fix = "there is a file in its place", "Set another run_dir."
    return UserError(
        f"run_dir must be a directory that can be written, got {run_dir} ({why}). {fix}"
    )


def log_to_terminal() -> None:
    """Write messages to the terminal, unless the program has set up logging itself."""
    for name in LOGGED:
        logger = logging.getLogger(name)
        if not logger.hasHandlers():
            logger.addHandler(_Terminal())
    logging.getLogger("lit_grpo").setLevel(logging.INFO)


def close_run_log(handler: logging.Handler) -> None:
    """Stop writing to a ``run.log``, so that a later run in this process does not write to it."""
    for name in LOGGED:
        logging.getLogger(name).removeHandler(handler)
    handler.close()


class _RunLog(logging.FileHandler):
    """Ignore a full disk: the next write that fails reports it in one line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _WithTraceback(logging.Formatter):
    """Add the traceback of a record that has one as text, which is too long for the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        lines = [super().format(record), getattr(record, "traceback", "")]
        return "\n".join(filter(None, lines))


class _Terminal(logging.Handler):
    """Write to the current ``sys.stderr``: a live progress bar replaces it to stay in place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def log_exception(run_log: logging.Handler) -> None:
    """Write the traceback to the file only; the terminal may get a single line."""
    message = "the run ended with an exception"
    details = (log.name, logging.ERROR, __file__, 0, message, (), sys.exc_info())
    run_log.handle(log.makeRecord(*details))
