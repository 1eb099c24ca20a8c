"""Write the causes of trouble into ``docs/troubleshooting.md``, from the table of the package.

Run it after a change in ``lit_grpo/diagnostics/causes/``, or of the exit codes:

    python scripts/write_causes.py
"""

from __future__ import annotations

import re
from pathlib import Path

from lit_grpo.diagnostics import CAUSES, Cause
from lit_grpo.stopping import SIGNAL_CODE, SIGNAL_MEANING, ExitCode

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
MARKS = re.compile(r"(<!-- causes: .*? -->\n).*?(<!-- end of causes -->)", re.DOTALL)

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
not listed here come from callbacks of your own.

| exit code | meaning | causes |
|---|---|---|
"""


def causes_page() -> str:
    """Return the section of the page that is about the causes."""
    rows = "\n".join(map(_row, CAUSES.values()))
    codes = "\n".join(map(_code_row, ExitCode))
    sections = "\n".join(map(_section, CAUSES.values()))
    return f"{HEAD}{rows}\n{CODES_HEAD}{codes}\n\n{sections}"


def _row(cause: Cause) -> str:
    code = "" if cause.exit_code is None else _shown(cause.exit_code)
    return f"| {link(cause)}: `{cause.name}` | {cause.noticed_by} | {cause.actions} | {code} |"


def _code_row(code: ExitCode) -> str:
    meaning = SIGNAL_MEANING if code == ExitCode.INTERRUPTED else code.meaning
    causes = ", ".join(link(cause) for cause in CAUSES.values() if cause.exit_code == code)
    return f"| {_shown(code)} | {meaning} | {causes} |"


def _shown(code: ExitCode) -> str:
    """Return an exit code; that of Ctrl-C stands for those of all signals."""
    return SIGNAL_CODE if code == ExitCode.INTERRUPTED else str(code.value)


def link(cause: Cause, page: str = "") -> str:
    """Return a link to the section of a cause."""
    return f"[{cause.title}]({page}#{_anchor(cause.title)})"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _section(cause: Cause) -> str:
    bullets = "\n".join(f"- {line}" for line in (*cause.advice, *cause.more))
    return f"### {cause.title}\n\n{cause.meaning}\n\n{bullets}\n"


def main() -> None:
    """Replace what stands between the marks."""
    page = PAGE.read_text()
    PAGE.write_text(MARKS.sub(lambda found: f"{found[1]}{causes_page()}\n{found[2]}", page))


if __name__ == "__main__":
    main()
