"""Run checks and print what they find; a check that fails does not stop the others."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_grpo.cli.built_run import NotChecked
from lit_grpo.cli.errors import one_line, place
from lit_grpo.rewards.scoring.scoring import RewardFailed
from lit_grpo.rollout import EngineFailed
from lit_grpo.types import UserCodeFailed, UserError
from lit_grpo.types.errors import Diverged

REPORTED = (
    *(UserError, RewardFailed, EngineFailed, Diverged),
    *(ImportError, MisconfigurationException),
)
"""Errors whose message says what is wrong and what to set."""
LOGGER = logging.getLogger("lit_grpo")


class State(StrEnum):
    """How serious a finding is: a run can start unless one has failed."""

    OK = "ok"
    REMARK = "remark"
    FAILED = "failed"


STYLES = {State.OK: "green", State.REMARK: "yellow", State.FAILED: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check; a failed one says what to do."""

    state: State
    text: str


def ok(text: str) -> Finding:
    return Finding(State.OK, text)


def remark(text: str) -> Finding:
    return Finding(State.REMARK, text)


def failed(text: str, fix: str) -> Finding:
    """Return a failure with what to do about it, in sentences that begin with a verb."""
    return Finding(State.FAILED, f"{text} {fix}")


def refused(text: str) -> Finding:
    """Return a failure whose text already says what to do, such as a `UserError`'s."""
    return Finding(State.FAILED, text)


def run_check(check: Callable[[], Iterable[Finding]], *, is_offline: bool) -> list[Finding]:
    """Return the findings of a check; an error and each logged warning also count as findings.

    Args:
        is_offline: Whether the network must not be used; a lack of it is then no failure.
    """
    findings: list[Finding] = []
    with _warnings_to(findings):
        try:
            for finding in check():
                findings.append(finding)
        except Exception as error:
            findings.append(finding_of(error, is_offline=is_offline))
    return findings


def finding_of(error: Exception, *, is_offline: bool) -> Finding:
    """Return what an error says about the run; the arguments are as in `run_check`."""
    if isinstance(error, NotChecked):
        return remark(str(error))
    if isinstance(error, UserCodeFailed):
        said = str(error).removesuffix(".")
        return failed(f"{said}.", "Fix that code.")
    if not isinstance(error, REPORTED):
        return failed(
            f"unexpectedly raised {type(error).__name__}: {error} ({_where(error)}).",
            "Fix that line, or set what it asks for; if it is one of lit-grpo, report it.",
        )
    if is_offline and _needs_network(error):
        return remark(f"Not checked (--offline): {error}")
    return refused(str(error))


def _where(error: Exception) -> str:
    """Return the line that raised an error, the last one of the user's if there is any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if _is_own(Path(one.filename))]
    last = (own or frames)[-1]
    return place(last.filename, last.lineno)


def _is_own(file: Path) -> bool:
    return file.is_relative_to(Path.cwd()) and "site-packages" not in file.parts


def _needs_network(error: BaseException | None) -> bool:
    """Return whether an error came from a request that was not made."""
    while error is not None:
        if "offline" in f"{type(error).__name__} {error}".lower():
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _warnings_to(findings: list[Finding]) -> Iterator[None]:
    """Turn what is logged as a warning within the context into remarks."""
    collector = _Collector(findings)
    before, LOGGER.propagate = LOGGER.propagate, False
    others, LOGGER.handlers = LOGGER.handlers, [collector]
    try:
        yield
    finally:
        LOGGER.propagate, LOGGER.handlers = before, others


class _Collector(logging.Handler):
    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(logging.WARNING)
        self._findings = findings

    def emit(self, record: logging.LogRecord) -> None:
        self._findings.append(remark(record.getMessage()))


def print_findings(console: Console, name: str, findings: Iterable[Finding]) -> None:
    """Print a row for each finding: its state, the name of the check, what was found."""
    table = Table.grid(padding=(0, 2))
    table.add_column(width=6)
    table.add_column(width=11)
    table.add_column(overflow="fold")
    for finding in findings:
        state = Text(finding.state, style=STYLES[finding.state])
        table.add_row(state, Text(name, style="bold"), Text(one_line(finding.text)))
        name = ""
    console.print(table)
