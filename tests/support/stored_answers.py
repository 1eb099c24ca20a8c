"""Open rows whose stored answers a judge grades by a fixed rule, and the recipe for them."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import yaml
from forked import start_process
from judge_server import Behaviour, JudgeServer, Reply, Request, judges

from lit_grpo.__main__ import main

PRECOMPUTE = ("precompute", "--preset", "mine.yaml")
PREPARE = ("prepare", "--preset", "mine.yaml", "--out", "out")
"""Commands that read the recipe."""
GRADES = {"a": 9, "b": 5, "c": 1}
"""Grade of an answer by its last letter."""
by_last_letter: Behaviour = judges(
    "answer", lambda request, one: {"score": GRADES[one.text.strip()[-1]]}
)


def slowly(seconds: float) -> Behaviour:
    """Return the judge by the last letter, with a delay."""

    def behave(request: Request) -> Reply:
        reply = by_last_letter(request)
        return Reply(reply.body, seconds=seconds)

    return behave


def write_rows(number: int, name: str = "rows.jsonl") -> None:
    rows = (
        {"question": f"Describe hill {n}.", "answers": [f"Hill {n} {x}" for x in GRADES]}
        for n in range(number)
    )
    Path(name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_recipe(server: JudgeServer, name: str = "mine.yaml", **changes: Any) -> None:
    """Write a recipe of ``rows.jsonl``; ``judge`` and ``gold`` add to its own keys."""
    judge = {
        "model": "m",
        "base_url": f"{server.url}/v1",
        "auth": "none",
        "temperature": 1.0,
        "price": {"prompt": 1.0, "completion": 10.0},
        "limits": {"max_concurrency": 4, "num_retries": 0},
    }
    recipe = {
        "description": "hills",
        "judge": judge | changes.pop("judge", {}),
        "gold": {"num_evals": 3} | changes.pop("gold", {}),
        "sources": {"open": {"kind": "open", "data": "rows.jsonl"}},
    } | changes
    Path(name).write_text(yaml.safe_dump(recipe))


def start_command(*words: str) -> tuple[ForkProcess, Connection]:
    """Start ``lit-grpo`` in a forked process, whose output `said` returns."""

    def run(sender: Connection) -> None:
        path = Path(f"said-{os.getpid()}")
        with path.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            code = main([*words])
        sender.send(code)

    return start_process(run)


def said(process: ForkProcess) -> str:
    return Path(f"said-{process.pid}").read_text()


def num_recorded() -> int:
    """Return the number of whole lines in the cache."""
    paths = Path("gold").glob("judge-*/*.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in paths)


def asked(server: JudgeServer) -> Counter[str]:
    """Return how often each answer was asked about."""
    return Counter(one.text for request in server.questions for one in request.of("answer"))
