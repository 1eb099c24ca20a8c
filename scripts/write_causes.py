"""Write the causes of trouble into ``docs/troubleshooting.md``, from the table of the package.

Run it after a change of ``lit_grpo/diagnostics/causes.py``:

    python scripts/write_causes.py
"""

from __future__ import annotations

import re
from pathlib import Path

from lit_grpo.diagnostics import CAUSES, Cause

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


def causes_page() -> str:
    """Return the section of the page that is about the causes."""
    rows = "\n".join(map(_row, CAUSES.values()))
    return f"{HEAD}{rows}\n\n" + "\n".join(map(_section, CAUSES.values()))


def _row(cause: Cause) -> str:
    code = "" if cause.exit_code is None else str(cause.exit_code.value)
    link = f"[{cause.title}](#{_anchor(cause.title)})"
    return f"| {link}: `{cause.name}` | {cause.noticed_by} | {cause.actions} | {code} |"


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
