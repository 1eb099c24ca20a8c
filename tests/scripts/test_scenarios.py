"""The table of trainings that fail on purpose, with few of them, and what it would notice."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import scenarios as script
from _scenario_list import SCENARIOS, Scenario
from paths import ROOT
from processes import run_program

COMMAND = [sys.executable, str(ROOT / "scripts" / "scenarios.py")]
SCENARIO = Scenario(
    title="x", says="the cause", ends=r"stopped after (\d+) steps", exit_code=3, keeps=4
)
KEPT = script.Kept(step=4, num_rows=5, completions=frozenset({0, 1, 2, 3, 4}), has_final=False)
OUTPUT = "run directory: run\n12:00:00 the cause\nstopped after 4 steps\n"
ENDING = script.Ending(exit_code=3, kept=KEPT, output=OUTPUT)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_runs_scenarios_and_prints_a_row_for_each(tmp_path):
    chosen = ["a NaN weight", "credentials", "SIGTERM"]
    result = run_program([*COMMAND, *chosen, "--markdown"], tmp_path)
    head, rule, *rows = result.stdout.splitlines()
    assert head.startswith("| what happens | what the user reads first | exit code |")
    assert rule == "| --- | --- | --- | --- | --- |"
    assert len(rows) == 3
    assert all(row.endswith("| yes |") for row in rows)


def test_an_ending_as_expected_has_no_problem():
    assert ENDING.problems(SCENARIO) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"exit_code": 0}, "exit code 3 was expected"),
        ({"output": f"another warning\n{OUTPUT}"}, "the first line is not 'the cause'"),
        ({"output": "the cause"}, r"no line with 'stopped after (\\d+) steps'"),
        (
            {"output": OUTPUT.replace("4 steps", "5 steps")},
            "a checkpoint of 4 steps is kept, [5] were said",
        ),
        ({"kept": replace(KEPT, step=3)}, "a checkpoint of 3 steps is kept, not of 4"),
        (
            {"kept": replace(KEPT, completions=frozenset({0, 2, 3}))},
            "not all of 4 steps have completions",
        ),
        ({"kept": replace(KEPT, has_final=True)}, "final/ must be there if and only if"),
        ({"output": f"{OUTPUT}Traceback (most recent call last):"}, "there is a traceback"),
    ],
)
def test_an_ending_that_is_not_as_expected_is_a_problem(changes, problem):
    problems = replace(ENDING, **changes).problems(SCENARIO)
    assert any(one.startswith(problem) for one in problems)


def test_titles_are_unique():
    assert len({one.title for one in SCENARIOS}) == len(SCENARIOS)
