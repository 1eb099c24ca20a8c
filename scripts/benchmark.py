"""Measure the figures of docs/performance.md: `python scripts/benchmark.py --help`.

`scripts/gpu_check.py` measures those of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from _benchmark.accuracy import compare_accuracy
from _benchmark.answers import compare_answers
from _benchmark.engines import compare_client
from _benchmark.overlap import compare_overlap
from _benchmark.parts import compare_engine, compare_head
from _benchmark.plan import compare_plan
from _benchmark.processes import Repetitions
from _benchmark.results import Result, markdown, print_tables, save
from _benchmark.rewards import compare_calls, compare_exposed
from _benchmark.rows import compare_rows
from _benchmark.steps import compare_steps
from _benchmark.stopping import compare_stopping
from _benchmark.workloads import SIZES, WORKLOADS

Figures = Callable[[argparse.Namespace], Iterator[Result]]


def steps(options: argparse.Namespace) -> Iterator[Result]:
    for name in options.workloads:
        yield from compare_steps(WORKLOADS[name], SIZES[options.size], repetitions(options))


def engine(options: argparse.Namespace) -> Iterator[Result]:
    for name in options.workloads:
        yield from compare_engine(WORKLOADS[name], SIZES[options.size], repetitions(options))


def head(options: argparse.Namespace) -> Iterator[Result]:
    return compare_head(options.head_tokens)


def accuracy(options: argparse.Namespace) -> Iterator[Result]:
    return compare_accuracy(options.start)


def answers(options: argparse.Namespace) -> Iterator[Result]:
    return compare_answers(options.rounds)


def rewards(options: argparse.Namespace) -> Iterator[Result]:
    yield from compare_calls(repetitions(options))
    yield from compare_exposed(SIZES[options.size], repetitions(options))


def engines(options: argparse.Namespace) -> Iterator[Result]:
    yield from compare_client(repetitions(options))
    yield from compare_overlap(SIZES[options.size], repetitions(options))


def plan(options: argparse.Namespace) -> Iterator[Result]:
    return compare_plan(options.rounds)


def stopping(options: argparse.Namespace) -> Iterator[Result]:
    return compare_stopping(options.rounds)


def rows(options: argparse.Namespace) -> Iterator[Result]:
    return compare_rows(options.rows)


def repetitions(options: argparse.Namespace) -> Repetitions:
    return Repetitions(rounds=options.rounds, steps=options.steps)


FIGURES: dict[str, Figures] = {
    "steps": steps,
    "engine": engine,
    "head": head,
    "accuracy": accuracy,
    "answers": answers,
    "rewards": rewards,
    "engines": engines,
    "plan": plan,
    "stopping": stopping,
    "rows": rows,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python scripts/benchmark.py",
        description="Time this project against TRL, and against the lower bounds of its parts.",
    )
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--size", choices=SIZES, default="10m", help="size of the model")
    parser.add_argument("--rounds", type=int, default=3, help="how often all take their turn")
    parser.add_argument("--steps", type=int, default=2, help="steps of each trainer in a round")
    parser.add_argument(
        "--head_tokens", type=int, default=4096, help="tokens of `head`; full logits: 2.3 MB each"
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="prepared rows of `rows`")
    parser.add_argument("--start", type=Path, help="warmed-up model for `accuracy`")
    parser.add_argument("--json", type=Path, help="add the results to this file")
    parser.add_argument(
        "--markdown", type=Path, help="measure nothing; print the tables of such a file"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text())))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the trainers' processes
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for name in options.only:
        for result in FIGURES[name](options):
            print_tables([result.to_row()])
            if options.json:
                save([result.to_row()], options.json)


if __name__ == "__main__":
    main()
