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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from _scenario_list import BASE, SCENARIOS, Running, Scenario
from _toy_judge import ToyJudge, toy_judge
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from lit_grpo.runs.checkpoint_files import damage, last_checkpoint

SCRIPTS = Path(__file__).parent
TIMEOUT_SECONDS = 300
SHOWN_CHARACTERS = 110


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a scenario ended."""

    exit_code: int
    line: str
    """The line that names the cause; empty if there is none."""
    kept: str
    output: str

    def problems(self, scenario: Scenario) -> list[str]:
        """Return what is not as it must be."""
        expected = scenario.exit_code
        return [
            problem
            for problem, holds in {
                f"exit code {expected} was expected": self.exit_code == expected,
                f"no line with {scenario.says!r}": bool(self.line),
                "no checkpoint is left": bool(self.kept) or not scenario.keeps,
                "there is a traceback": scenario.shows_traceback
                or "Traceback (most recent call last)" not in self.output,
            }.items()
            if not holds
        ]


def run_scenario(scenario: Scenario, directory: Path) -> Ending:
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
        ending = train(scenario, run, toy, scenario.drive)
        if scenario.then is not None:
            scenario.then(run)
            ending = train(scenario, run, toy, None, "--ckpt_path", "auto")
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
    drive: Callable[[Running], None] | None,
    *options: str,
) -> Ending:
    """Run the training in a process group of its own, and return how it ended."""
    command = [*scenario.command, sys.executable, "-m", "lit_grpo", "fit"]
    command += ["--config", "scenario.yaml", "--run_dir", "run", *options]
    environment = os.environ | {
        "PYTHONPATH": str(SCRIPTS),
        "OMP_NUM_THREADS": "1",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "COLUMNS": "200",
    }
    environment |= scenario.environment
    with (run.parent / "output.txt").open("w+") as file:
        process = subprocess.Popen(
            command,
            cwd=run.parent,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            if drive is not None:
                drive(Running(process=process, run=run, judge=judge))
            code = process.wait(TIMEOUT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output = (run.parent / "output.txt").read_text()
    found = (line for line in output.splitlines() if re.search(scenario.says, line))
    kept = run.parent / "kept" if scenario.command else run
    return Ending(exit_code=code, line=next(found, ""), kept=what_is_kept(kept), output=output)


def what_is_kept(run: Path) -> str:
    """Return the newest intact checkpoint and the number of rows; empty without a checkpoint."""
    checkpoint = last_checkpoint(run)
    if checkpoint is None or damage(checkpoint, reads_all=True):
        return ""
    metrics = run / "metrics.csv"
    num_rows = len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0
    return f"{checkpoint.resolve().stem}, {num_rows} rows of metrics"


def print_table(
    scenarios: Sequence[Scenario], found: Mapping[str, Ending], *, as_markdown: bool
) -> int:
    """Print a row for each scenario, then what is wrong; return the exit code."""
    heads = ("what happens", "what the user reads", "exit code", "what is kept", "as expected")
    rows = [
        (
            one.title,
            shorten(ending.line),
            str(ending.exit_code),
            ending.kept or "–",
            "no" if ending.problems(one) else "yes",
        )
        for one in scenarios
        for ending in [found[one.title]]
    ]
    if as_markdown:
        for row in (heads, ["---"] * len(heads), *rows):
            print(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")
    else:
        table = Table(box=SIMPLE_HEAD)
        for head in heads:
            table.add_column(head)
        for row in rows:
            table.add_row(*map(escape, row))
        Console(width=None if sys.stdout.isatty() else 180).print(table)
    wrong = {
        one.title: problems for one in scenarios if (problems := found[one.title].problems(one))
    }
    for title, problems in wrong.items():
        print(f"{title}: {'; '.join(problems)}", file=sys.stderr)
    return 1 if wrong else 0


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
    for one in named:
        if one not in chosen:
            print(f"left out, for lack of {one.needs}: {one.title}", file=sys.stderr)
    with TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        root = (arguments.dir or Path(temporary)).absolute()
        endings = pool.map(lambda one: run_scenario(one, root / one.title), chosen)
        shown = track(endings, "scenarios", len(chosen), console=Console(stderr=True))
        found = {one.title: ending for one, ending in zip(chosen, shown, strict=True)}
    return print_table(chosen, found, as_markdown=arguments.markdown)


if __name__ == "__main__":
    sys.exit(main())
