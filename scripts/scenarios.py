"""Run trainings that fail on purpose, and check how each of them ends.

What the user reads, the exit code and what is kept must be as expected:

    python scripts/scenarios.py                 all of them; minutes
    python scripts/scenarios.py judge nan       those with one of these words in their title
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import yaml
from _checks import num_steps
from _scenario import BASE, SOME, Process, Running, Scenario
from _scenario_code import JUDGE_VARIABLE, SIGNALLED
from _scenario_list import SCENARIOS
from _toy_judge import ToyJudge, toy_judge
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from write_causes import link

from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.runs.checkpoints.files import last_checkpoint, read_manifest, why_unusable
from lit_grpo.runs.files.events import read_events

SCRIPTS = Path(__file__).parent
TIMEOUT_SECONDS = 300
SHOWN_CHARACTERS = 120
TROUBLESHOOTING = "troubleshooting.md"
HEADS = (
    "what happens", "cause", "what the user reads first", "exit code", "what is kept",
    "as expected",
)  # fmt: skip
USUAL = re.compile(
    r"run directory: |reading and tokenizing |(train|validation) data: |asking judge |"
    r"loading the model |no validation will run |Server .* is ready |step \d+/|"
    r"writing the final model |wandb: |done after |resuming from |"
    r"Curves and a summary: |GRPO from here: |"
    r"Resume (after \d+ steps? )?with: |Resumed as it is, this run would stop again"
)
"""What a healthy run prints."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a scenario ended."""

    exit_code: int
    kept: Kept
    output: str

    def line(self, scenario: Scenario) -> str:
        """Return the first line that is not said of every run; empty if there is none."""
        lines = (line for line in self.output.splitlines() if line.strip())
        return next(
            (one for one in lines if re.search(scenario.says, one) or not re.match(USUAL, one)), ""
        )

    def problems(self, scenario: Scenario) -> list[str]:
        """Return what differs from what is expected."""
        expected, line = scenario.exit_code, self.line(scenario)
        end = re.search(scenario.ends, self.output)
        found = (re.search(scenario.says, line), end)
        said = [int(one[1]) for one in found if one is not None and one.re.groups > 0]
        steps = self.kept.step or 0
        return [
            problem
            for problem, holds in {
                f"exit code {expected} was expected": self.exit_code == expected,
                f"the first line is not {scenario.says!r}": re.search(scenario.says, line),
                f"no line with {scenario.ends!r}": end,
                f"a checkpoint of {steps} steps is kept, not of {scenario.keeps}": self.kept.step
                == scenario.keeps
                or (scenario.keeps == SOME and steps > 0),
                f"a checkpoint of {steps} steps is kept, {said} were said": {*said} <= {steps},
                f"not all of {steps} steps have completions": self.kept.completions
                >= set(range(steps)),
                "final/ must be there if and only if the run is done": self.kept.has_final
                == (expected == 0),
                f"no event {scenario.event!r} is due to {scenario.cause}": not scenario.event
                or (scenario.event, scenario.cause) in self.kept.events,
                "there is a traceback": scenario.shows_traceback
                or "Traceback (most recent call last)" not in self.output,
            }.items()
            if not holds
        ]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a run has left."""

    step: int | None
    """Finished rollout steps of the newest intact checkpoint; None without one."""
    num_rows: int
    completions: frozenset[int]
    """Steps whose completions can be read."""
    has_final: bool
    events: frozenset[tuple[str, str]] = frozenset()
    """The kinds of what ``events.jsonl`` says, each with its cause."""

    def __str__(self) -> str:
        if self.step is None:
            return "–"
        parts = [f"checkpoint of {self.step} steps, {self.num_rows} rows of metrics"]
        parts += [f"completions of {len(self.completions)}"] + ["final/"] * self.has_final
        return ", ".join(parts)


Start = Callable[[Sequence[str], Path, Mapping[str, str], Path], Process]
"""Starts a command in a directory and an environment, with a file for its output."""


def start_program(
    command: Sequence[str], directory: Path, environment: Mapping[str, str], said: Path
) -> Process:
    """Start a command in a process group of its own."""
    with said.open("w") as file:
        return subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_scenario(scenario: Scenario, directory: Path, start: Start = start_program) -> Ending:
    """Run a scenario in a directory of its own."""
    run = directory / "run"
    run.parent.mkdir(parents=True)
    if scenario.command:
        run.mkdir()
    if scenario.prepare is not None:
        scenario.prepare(directory)
    judge = nullcontext() if scenario.judge is None else toy_judge(**scenario.judge)
    with judge as toy:
        write_config(scenario, directory, toy)
        ending = train(scenario, run, toy, start, scenario.drive)
        if scenario.then is not None:
            scenario.then(run)
            ending = train(scenario, run, toy, start, None, "--ckpt_path", "auto")
    return ending


def write_config(scenario: Scenario, directory: Path, judge: ToyJudge | None) -> None:
    config = copy.deepcopy(BASE)
    settings = dict(scenario.settings)
    if judge is not None:
        limits = {"num_retries": 0, "call_timeout_seconds": 10}
        asked = {"model": "toy", "base_url": f"{judge.url}/v1", "auth": "none", "limits": limits}
        settings["model.rewards"] = [{"class_path": "JudgeReward", "init_args": {"judge": asked}}]
    for key, value in settings.items():
        *path, last = key.split(".")
        inner = config
        for name in path:
            inner = inner[name]
        inner[last] = value
    (directory / "scenario.yaml").write_text(yaml.safe_dump(config))


def train(
    scenario: Scenario,
    run: Path,
    judge: ToyJudge | None,
    start: Start,
    drive: Callable[[Running], None] | None,
    *options: str,
) -> Ending:
    """Run the training, and return how it ended."""
    command = [*scenario.command, sys.executable, "-m", "lit_grpo", "fit"]
    command += ["--config", "scenario.yaml", "--run_dir", "run", *options]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "COLUMNS": "200",
    }
    environment |= scenario.environment
    if judge is not None:
        environment[JUDGE_VARIABLE] = judge.url
    said = run.parent / "output.txt"
    process = start(command, run.parent, environment, said)
    try:
        if drive is not None:
            drive(Running(process=process, run=run))
        code = process.wait(TIMEOUT_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_signalled(run.parent / SIGNALLED)
    kept = run.parent / "kept" if scenario.command else run
    output = said.read_text().replace(f"{run.parent}/", "")
    return Ending(exit_code=code, kept=what_is_kept(kept), output=output)


def end_signalled(file: Path) -> None:
    """End the processes that a scenario has stopped: they would stay."""
    for line in file.read_text().splitlines() if file.exists() else ():
        with suppress(ProcessLookupError):
            os.kill(int(line), signal.SIGKILL)


def what_is_kept(run: Path) -> Kept:
    checkpoint = last_checkpoint(run)
    if checkpoint is not None and why_unusable(checkpoint, reads_all=True):
        checkpoint = None
    manifest = None if checkpoint is None else read_manifest(checkpoint)
    return Kept(
        step=None if manifest is None else manifest.rollout_step,
        num_rows=num_steps(run / "metrics.csv"),
        completions=frozenset(_steps_with_completions(run / "completions")),
        has_final=(run / "final" / "model.safetensors").exists(),
        events=frozenset((event.kind, event.cause) for event in read_events(run)),
    )


def _steps_with_completions(directory: Path) -> Iterator[int]:
    for path in directory.glob("step_*.parquet"):
        if len(pd.read_parquet(path)):
            yield int(path.stem.removeprefix("step_"))


def print_table(
    scenarios: Sequence[Scenario], found: Mapping[str, Ending], *, as_markdown: bool
) -> int:
    """Print a row for each scenario, then what is wrong; return the exit code.

    One that was not run has a row, too, which says what is missing.
    """
    rows = [_row(one, found.get(one.title), as_markdown=as_markdown) for one in scenarios]
    if as_markdown:
        for row in (HEADS, ["---"] * len(HEADS), *rows):
            print(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")
    else:
        table = Table(box=SIMPLE_HEAD)
        for head in HEADS:
            table.add_column(head)
        for row in rows:
            table.add_row(*map(escape, row))
        Console(width=None if sys.stdout.isatty() else 180).print(table)
    wrong = {
        one.title: problems
        for one in scenarios
        if one.title in found and (problems := found[one.title].problems(one))
    }
    for title, problems in wrong.items():
        print(f"{title}: {'; '.join(problems)}", file=sys.stderr)
    return 1 if wrong else 0


def _row(scenario: Scenario, ending: Ending | None, *, as_markdown: bool) -> tuple[str, ...]:
    cause = CAUSES[scenario.cause]
    named = scenario.title, link(cause, TROUBLESHOOTING) if as_markdown else cause.name
    if ending is None:
        return (*named, f"not run: it needs {scenario.needs}", "–", "–", "–")
    holds = "no" if ending.problems(scenario) else "yes"
    line = shorten(ending.line(scenario))
    return (*named, line, str(ending.exit_code), str(ending.kept), holds)


def shorten(line: str) -> str:
    """Return the start of a line, without its time."""
    line = re.sub(r"^\S*\d\d:\d\d:\d\d\S*\s+", "", line.strip())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}…"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="run the scenarios with one of them in the title")
    parser.add_argument("--dir", type=Path, help="keep the runs there (default: delete them)")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    arguments = parser.parse_args()
    named = [
        one
        for one in SCENARIOS
        if not arguments.words or any(word in one.title for word in arguments.words)
    ]
    chosen = [one for one in named if one.needs is None or one.needs.exists()]
    with TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        root = (arguments.dir or Path(temporary)).absolute()
        endings = pool.map(lambda one: run_scenario(one, root / one.title), chosen)
        shown = track(endings, "scenarios", len(chosen), console=Console(stderr=True))
        found = {one.title: ending for one, ending in zip(chosen, shown, strict=True)}
    return print_table(named, found, as_markdown=arguments.markdown)


if __name__ == "__main__":
    sys.exit(main())
