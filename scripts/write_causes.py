"""Write causes of trouble and exit codes into the docs, from the tables of the package.

The causes go to ``docs/troubleshooting.md``, the exit codes also to ``docs/configuration.md``.
Run it after a change in ``lit_grpo/diagnostics/causes/``, or of the exit codes:

    python scripts/write_causes.py
"""

from __future__ import annotations

import re
from pathlib import Path

from lit_grpo.cli.commands import OWN_EXIT_CODES
from lit_grpo.diagnostics.causes.cause import Cause
from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.stopping import SIGNAL_CODE, ExitCode, exit_codes

DOCS = Path(__file__).parent.parent / "docs"

HEAD = """
## What a run notices by itself

Each cause is acted on once it has lasted for a number of rollout steps, its patience. The key
`rules` of [`HealthMonitor`](configuration.md#healthmonitor) changes patience and action of those it
notices; the others have settings of their own, which their sections name. The message in `run.log`
gives the evidence and the first remedies. `events.jsonl` and the report list warnings, alerts,
rollbacks and stops, and [`Alerts`](configuration.md#alerts) sends all but the warnings.

| cause | noticed by | action | exit code |
|---|---|---|---|
"""


CODES_HEAD = """
### What an exit code says

The last lines on the terminal say why a run ended; the exit code narrows down the cause. A run that
was stopped has no `final/`: remove the cause, and resume it with `lit-grpo fit RUN`. Codes that are
not listed here come from callbacks of your own. Some commands give a code a
[further meaning](configuration.md#exit-codes).

| exit code | meaning | causes |
|---|---|---|
"""
OWN_CODES_HEAD = """
Some commands give a code a further meaning:

| command | code | meaning |
|---|---|---|
"""
DETAILS = {
    0: "This is so even if wandb failed.",
    4: "See [`OutagePolicy`](#outagepolicy).",
    5: "See [engines.md](engines.md).",
    6: "See [troubleshooting.md](troubleshooting.md#the-gradient-is-not-finite).",
    7: "See [the time is up](troubleshooting.md#the-time-is-up).",
    8: "See [`StallWatchdog`](#stallwatchdog).",
    9: "See [scale.md](scale.md#when-a-machine-is-lost).",
    130: "There is a checkpoint, unless training had not begun.",
    SIGNAL_CODE: "138 is SIGUSR1. There is a checkpoint, as after Ctrl-C.",
}
"""Exit code -> what ``docs/configuration.md`` adds to its meaning."""


def causes_page() -> str:
    """Return the section of the page that is about the causes."""
    rows = "\n".join(map(_row, CAUSES.values()))
    codes = "\n".join(_code_row(code, meaning) for code, meaning in exit_codes().items())
    sections = "\n".join(map(_section, CAUSES.values()))
    return f"{HEAD}{rows}\n{CODES_HEAD}{codes}\n\n{sections}"


def _row(cause: Cause) -> str:
    code = "" if cause.exit_code is None else _shown(cause.exit_code)
    return f"| {link(cause)}: `{cause.name}` | {cause.noticed_by} | {cause.actions} | {code} |"


def _code_row(code: str, meaning: str) -> str:
    causes = ", ".join(
        link(cause)
        for cause in CAUSES.values()
        if cause.exit_code is not None
        and code in (str(cause.exit_code.value), _shown(cause.exit_code))
    )
    return f"| {code} | {meaning} | {causes} |"


def _shown(code: ExitCode) -> str:
    """Return an exit code; that of Ctrl-C stands for those of all signals."""
    return SIGNAL_CODE if code == ExitCode.INTERRUPTED else str(code.value)


def codes_page() -> str:
    """Return the tables of exit codes of ``docs/configuration.md``."""
    details = {str(code): f". {detail}" for code, detail in DETAILS.items()}
    codes = [f"| {code} | {what}{details.get(code, '')} |" for code, what in exit_codes().items()]
    codes.append("| others | chosen by a callback in its `StopReason` |")
    own = [
        f"| `{command}` | {code} | {meaning} |"
        for command, meanings in OWN_EXIT_CODES.items()
        for code, meaning in meanings.items()
    ]
    head = "\n| code | meaning |\n|---|---|\n"
    return f"{head}{_lines(codes)}{OWN_CODES_HEAD}{_lines(own)}"


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def link(cause: Cause, page: str = "") -> str:
    """Return a link to the section of a cause."""
    return f"[{cause.title}]({page}#{_anchor(cause.title)})"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _section(cause: Cause) -> str:
    bullets = "\n".join(f"- {line}" for line in (*cause.advice, *cause.more))
    return f"### {cause.title}\n\n{cause.meaning}\n\n{bullets}\n"


def main() -> None:
    """Replace what stands between the marks of each page."""
    for name, (page, text) in SECTIONS.items():
        path, start, end = DOCS / page, f"<!-- {name}: ", f"<!-- end of {name} -->"
        before, _, rest = path.read_text().partition(start)
        mark, _, rest = rest.partition("\n")
        path.write_text(f"{before}{start}{mark}\n{text()}\n{end}{rest.partition(end)[2]}")


SECTIONS = {
    "causes": ("troubleshooting.md", causes_page),
    "exit codes": ("configuration.md", codes_page),
}
"""What the marks call a section -> the page that has it, and its text."""


if __name__ == "__main__":
    main()
