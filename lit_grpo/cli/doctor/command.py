"""The command ``lit-grpo doctor``: run all checks, print what they find, return the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from lit_grpo.cli.built_run import BuiltRun
from lit_grpo.cli.command_line import CommandLine
from lit_grpo.cli.doctor.batch import check_batch, check_callbacks
from lit_grpo.cli.doctor.credentials import check_credentials, check_judges
from lit_grpo.cli.doctor.data import check_lengths, check_rows, check_scoring
from lit_grpo.cli.doctor.disk import check_disk
from lit_grpo.cli.doctor.engine import check_engine, check_teacher
from lit_grpo.cli.doctor.estimate import check_memory
from lit_grpo.cli.doctor.findings import Finding, State, print_findings, run_check
from lit_grpo.cli.doctor.hub import use_of_the_hub
from lit_grpo.cli.doctor.machine import check_versions
from lit_grpo.cli.doctor.model import check_model
from lit_grpo.cli.doctor.probe import check_rollout
from lit_grpo.runs.tables import open_console
from lit_grpo.stopping import ExitCode

Check = Callable[[BuiltRun], Iterable[Finding]]

SOME_FAILED = 1
"""Exit code of ``doctor`` if a check failed."""

CHECKS: dict[str, tuple[Check, ...]] = {
    "versions": (check_versions,),
    "model": (check_model,),
    "data": (check_rows, check_lengths, check_scoring),
    "batch": (check_batch, check_callbacks),
    "memory": (check_memory,),
    "disk": (check_disk,),
    "engine": (check_engine, check_teacher),
    "credentials": (check_credentials,),
    "judge": (check_judges,),
}
"""Name -> what is checked under it, in this order; one that fails does not stop the next."""


def run_doctor(cli: CommandLine) -> int:
    """Run all checks, and return 1 if one of them failed."""
    run = BuiltRun(cli)
    checks = CHECKS | ({"probe": (check_rollout,)} if cli.config.probe else {})
    with use_of_the_hub(is_offline=run.is_offline):
        states = _run_all(checks, run)
    open_console().print(f"\n{summary(states)}", soft_wrap=True)
    return SOME_FAILED if _named(states, State.FAILED) else ExitCode.DONE


def _run_all(checks: dict[str, tuple[Check, ...]], run: BuiltRun) -> dict[str, set[State]]:
    """Run the checks, and print what each finds as soon as it is done."""
    console = open_console()
    states: dict[str, set[State]] = {}
    for name, parts in checks.items():
        with console.status(f"checking: {name}"):
            found = [one for part in parts for one in _run(part, run)]
        print_findings(console, name, found)
        states[name] = {finding.state for finding in found}
    return states


def _run(check: Check, run: BuiltRun) -> list[Finding]:
    return run_check(partial(check, run), is_offline=run.is_offline)


def summary(states: dict[str, set[State]]) -> str:
    """Return in a line whether the run can start."""
    wrong, noted = _named(states, State.FAILED), _named(states, State.REMARK)
    if wrong:
        return f"Do not start yet: {', '.join(wrong)} failed."
    remarks = f", with remarks on {', '.join(noted)}" if noted else ""
    return f"Ready to start{remarks}."


def _named(states: dict[str, set[State]], state: State) -> list[str]:
    return [name for name, found in states.items() if state in found]
