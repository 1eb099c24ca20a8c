"""Read what runs have logged, and find out which run started from which.

A run started from another one if the policy of its ``config.yaml`` lies in the other's directory,
such as ``final/``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from itertools import compress
from pathlib import Path

import pandas as pd

from lit_grpo.runs.files.config import argument, is_run, read_config, similar_run
from lit_grpo.runs.files.event_log import read_events
from lit_grpo.runs.files.lock import is_locked
from lit_grpo.runs.report.gaps import Gaps, find_gaps
from lit_grpo.types import UserError
from lit_grpo.types.settings import list_some

ACCURACY = "val/accuracy"
UNSCORED = "val/unscored_fraction"


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One run directory and its metrics, one row for each step."""

    path: Path
    label: str
    metrics: pd.DataFrame
    started_from: Run | None = None
    """The run whose model it started from, if that is among those that were loaded."""
    read_up_to: int | None = None
    """The last step that was asked for; None if all of them were."""
    is_live: bool = False
    """Whether a process trained in the directory when it was read."""
    cut_lines: Sequence[int] = ()
    """Lines of ``metrics.csv``, from 1, that are cut off, and left out."""

    @property
    def stages(self) -> tuple[Run, ...]:
        """The runs that led to this one, and this one, in order."""
        return (*(self.started_from.stages if self.started_from else ()), self)

    @property
    def num_steps(self) -> int:
        """The steps up to the last row: 0 if the run ended, or still is, in its first one."""
        if self.metrics.empty:
            return 0
        return int(self.metrics["step"].iloc[-1]) + 1

    @cached_property
    def gaps(self) -> Gaps:
        """Its lost data, according to its files when this is first asked for."""
        return find_gaps(
            self.path,
            self._resumes,
            self.cut_lines,
            is_live=self.is_live or is_locked(self.path),
            read_up_to=self.read_up_to,
        )

    @property
    def _resumes(self) -> dict[int, float]:
        """Step, from 1, -> how often the run had been resumed, of the rows of finished steps."""
        rows = self.metrics.reindex(columns=["step", "resumes"])  # older versions had no resumes
        found = {int(step) + 1: float(number) for step, number in rows.itertuples(index=False)}
        return {step: number for step, number in found.items() if step > 0}

    @property
    def seconds(self) -> float:
        return 0.0 if self.metrics.empty else float(self.metrics["seconds"].iloc[-1])

    @property
    def clock(self) -> pd.Series:
        """The seconds at which steps were logged, indexed by step from 1."""
        return self.values("seconds").astype(float).cummax()

    @property
    def sources(self) -> list[str]:
        """The names of the sources of its data; none if it has only one."""
        shares = (re.fullmatch(r"data/(\w+)/share", str(name)) for name in self.metrics)
        return [match[1] for match in shares if match]

    def has(self, metric: str) -> bool:
        return metric in self.metrics and bool(self.metrics[metric].notna().any())

    def values(self, metric: str) -> pd.Series:
        """Return the values of a metric, indexed by step from 1; steps without one are left out.

        A validation before training has index 0.
        """
        series = self.metrics.set_index("step")[metric].dropna()
        series.index += 1
        return series

    def ends(self, metric: str) -> tuple[float, float]:
        """Return the first and the last value of a metric."""
        values = self.values(metric)
        return values.iloc[0], values.iloc[-1]

    def change(self, metric: str) -> tuple[float, float | None]:
        """Return the first and the last value of a metric; None if it was measured once."""
        first, last = self.ends(metric)
        return first, None if len(self.values(metric)) == 1 else last

    @property
    def unscored_fractions(self) -> dict[str, float]:
        """The largest shares of held-out completions that a validation could not score.

        That of greedy ones is under `UNSCORED`. Shares of 0 are left out.
        """
        names = [str(name) for name in self.metrics if str(name).startswith(UNSCORED)]
        largest = {name: float(self.values(name).max()) for name in names}
        return {name: fraction for name, fraction in largest.items() if fraction > 0}

    def when(self, metric: str) -> str:
        """Return at which step a metric was last logged; empty if that was the last step."""
        step = int(self.values(metric).index[-1])
        if step == self.num_steps:
            return ""
        return "before training" if step == 0 else f"at step {step} of {self.num_steps}"


def load_runs(run_dirs: Sequence[str | Path], read_up_to: int | None = None) -> list[Run]:
    """Read run directories; a run comes after the one that it started from.

    Args:
        read_up_to: The last step to read of each run; None reads all of them.

    Raises:
        UserError: a directory does not exist, or is not a run's.
    """
    paths = list({Path(path).resolve(): Path(path) for path in run_dirs}.values())
    is_live = {path: is_locked(path) for path in paths}  # before rows: it may end meanwhile
    metrics = {path: _read_metrics(path, read_up_to) for path in paths}
    labels = dict(zip(paths, _labels(paths), strict=True))
    sources = {path: _find_source(path, paths) for path in paths}
    runs: dict[Path | None, Run] = {}
    for path in paths:
        for stage in _lineage(path, sources):
            if stage not in runs:
                rows, cut_lines = metrics[stage]
                runs[stage] = Run(
                    path=stage,
                    label=labels[stage],
                    metrics=rows,
                    started_from=runs.get(sources[stage]),
                    read_up_to=read_up_to,
                    is_live=is_live[stage],
                    cut_lines=cut_lines,
                )
    return list(runs.values())


def are_stages(runs: Sequence[Run]) -> bool:
    """Return whether these are stages of one training: each run started from the one before."""
    return list(runs[-1].stages) == list(runs)


def _read_metrics(path: Path, read_up_to: int | None) -> tuple[pd.DataFrame, list[int]]:
    """Return the rows of ``metrics.csv``, and the numbers of lines that are cut off.

    A run without a finished step has no rows.
    """
    if not path.is_dir():
        hint = similar_run(path) or " Example: runs/quickstart/0."
        raise UserError(f"{path}: no such run directory.{hint}")
    file = path / "metrics.csv"
    if not is_run(path):
        inside = sorted(filter(is_run, path.glob("*")))
        hint = f" Did you mean {list_some([*map(str, inside)], 5)}?" if inside else ""
        raise UserError(
            f"{path} is not the directory of a run: it has no metrics.csv, and nothing else that a "
            f"run writes.{hint}"
        )
    cut_lines: list[int] = []
    metrics = pd.DataFrame(columns=["step", "seconds"])
    if file.exists() and file.stat().st_size:
        try:
            text, cut_lines = _split_rows(file.read_text())
            metrics = pd.read_csv(StringIO(text))
            metrics = metrics.astype({"step": int, "seconds": float})
        except (ValueError, KeyError) as error:
            raise UserError(
                f"{file} is damaged, or was not written by a run (which gives every row a step and "
                f"seconds): {error}. Move it away to report on the rest."
            ) from error
    return metrics if read_up_to is None else metrics[metrics["step"] < read_up_to], cut_lines


def _split_rows(text: str) -> tuple[str, list[int]]:
    """Return a file without the lines that are cut off, and their numbers, from 1.

    A live run may not have finished writing the last one.
    """
    header, *rows = text.splitlines(keepends=True) or [""]
    num_columns = len(next(csv.reader([header]), []))
    is_whole = [row.endswith("\n") and row.count(",") == num_columns - 1 for row in rows]
    cut = [number for number, whole in enumerate(is_whole, start=2) if not whole]
    return "".join([header, *compress(rows, is_whole)]), cut


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return the last two parts of each path, or more if these are the same for several paths."""
    parts = [path.resolve().parts for path in paths]
    labels: list[str] = []
    for num_parts in range(2, max(map(len, parts)) + 1):
        labels = ["/".join(one[-num_parts:]) for one in parts]
        if len(set(labels)) == len(labels):
            break
    return labels


def _find_source(path: Path, paths: Sequence[Path]) -> Path | None:
    """Return the other run in whose directory the policy of this run lies, if it is among these.

    A relative path counts from the directory where the run was started. Without an event that
    names it, that is usually this one or one above the run.
    """
    starts = [one for one in read_events(path) if one.policy]
    started_in = [Path(one.directory) for one in starts[-1:]]
    config = read_config(path / "config.yaml")
    policy = starts[-1].policy if starts else argument(config, "model", "policy", "path")
    if not isinstance(policy, str):
        return None
    bases = (*started_in, Path.cwd(), *path.resolve().parents)
    places = [(base / policy).resolve() for base in bases]
    for other in paths:
        if other != path and any(place.is_relative_to(other.resolve()) for place in places):
            return other
    return None


def _lineage(path: Path, sources: Mapping[Path, Path | None]) -> list[Path]:
    """Return the runs that led to this one, and this one, in order."""
    lineage = [path]
    while (source := sources[lineage[0]]) is not None and source not in lineage:
        lineage.insert(0, source)
    return lineage
