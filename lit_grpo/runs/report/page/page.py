"""Write the HTML page of a report: one file that a browser shows without any network.

Texts of runs are data here: nothing in a prompt, a completion or a message can run as a script.
"""

from __future__ import annotations

import gzip
import json
import secrets
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lit_grpo import __version__
from lit_grpo.runs.report.curves import phase_starts
from lit_grpo.runs.report.held_out import held_out_notes
from lit_grpo.runs.report.history import Run, are_stages
from lit_grpo.runs.report.page.charts import COLORS, DASHES, draw_charts, draw_clock
from lit_grpo.runs.report.page.completions import sample_completions
from lit_grpo.runs.report.page.diagnosis import Mark, diagnose, find_marks
from lit_grpo.runs.report.page.log_entry import log_entry
from lit_grpo.runs.report.summary import HEADINGS, gap_notes, summary_row, token_notes
from lit_grpo.types.atomic import replacing_file

HERE = Path(__file__).parent
PLOTLY = files("plotly") / "package_data" / "plotly.min.js"
MAX_EVENTS = 500
"""Limit of the table; the newest ones are shown."""
MAX_DRAWN = 100
"""Events with a line in every chart; the newest ones are drawn."""


def write_page(
    runs: Sequence[Run],
    path: Path,
    *,
    read_up_to: int | None = None,
    reload_seconds: float | None = None,
) -> None:
    """Write the page of runs, in one move, so that a browser never sees half of it.

    Args:
        read_up_to: The last step that was read of each run.
        reload_seconds: Interval at which the page reloads itself, for a live run.
    """
    is_comparison = not are_stages(runs)
    diagnoses = [diagnose(run) for run in runs]
    marks = [find_marks(number, run) for number, run in enumerate(runs)]
    drawn = [[mark for mark in one if mark.is_drawn] for one in marks]
    sample = sample_completions(runs)
    data = {
        "runs": _looks(runs),
        "isComparison": is_comparison,
        "charts": draw_charts(runs, is_comparison=is_comparison),
        "marks": [asdict(mark) for mark in _newest(drawn, MAX_DRAWN)],
        "completions": asdict(sample),
        "reloadSeconds": reload_seconds,
    }
    page = (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=("  ·  " if is_comparison else "  →  ").join(run.label for run in runs),
            version=__version__,
            written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
            read_up_to=read_up_to,
            reload_seconds=reload_seconds,
            headings=HEADINGS,
            rows=[summary_row(run) for run in runs],
            table_notes=[*gap_notes(runs), *held_out_notes(runs), *token_notes(runs)],
            diagnoses=diagnoses,
            labels=[run.label for run in runs],
            events=_newest(marks, MAX_EVENTS),
            num_events=sum(map(len, marks)),
            notes=sample.notes,
            entries=[log_entry(*one) for one in zip(runs, diagnoses, strict=True)],
            data=_as_script(data),
            plotly=_compressed_plotly(),
            nonce=secrets.token_urlsafe(16),
        )
    )
    with replacing_file(path) as partial:
        partial.write_text(page, encoding="utf-8")


@cache
def _compressed_plotly() -> str:
    """Return Plotly's script, compressed and in base64: 2 MB instead of 5."""
    return b64encode(gzip.compress(PLOTLY.read_bytes(), compresslevel=6)).decode()


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _looks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [
        {
            "label": run.label,
            "clock": draw_clock(run),
            "phases": phase_starts(run),
            "color": COLORS[number % len(COLORS)],
            "dash": DASHES[number // len(COLORS) % len(DASHES)],
        }
        for number, run in enumerate(runs)
    ]


def _newest(marks: Sequence[Sequence[Mark]], number: int) -> list[Mark]:
    """Return at most this many events, an equal share of each run."""
    share = max(1, number // len(marks))
    return [mark for one in marks for mark in one[-share:]]


def _as_script(data: dict[str, Any]) -> Markup:
    """Return JSON that cannot end the script element in which it stands."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e"))
