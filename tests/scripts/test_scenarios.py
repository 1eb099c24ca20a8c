"""The table of trainings that fail on purpose, with few of them, and what it would notice."""

from __future__ import annotations

import sys

import pytest
import scenarios as script
from _scenario_list import SCENARIOS, Scenario
from paths import ROOT
from processes import run_program

COMMAND = [sys.executable, str(ROOT / "scripts" / "scenarios.py")]
SCENARIO = Scenario(title="x", says="the cause", exit_code=3)
ENDING = script.Ending(
    exit_code=3, line="the cause", kept="step_000004, 4 rows", output="the cause"
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_runs_scenarios_and_prints_a_row_for_each(tmp_path):
    chosen = ["a NaN weight", "credentials", "SIGTERM"]
    result = run_program([*COMMAND, *chosen, "--markdown"], tmp_path)
    head, rule, *rows = result.stdout.splitlines()
    assert head.startswith("| what happens | what the user reads | exit code |")
    assert rule == "| --- | --- | --- | --- | --- |"
    assert len(rows) == 3
    assert all(row.endswith("| yes |") for row in rows)


def test_an_ending_as_expected_has_no_problem():
    assert ENDING.problems(SCENARIO) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"exit_code": 0}, "exit code 3 was expected"),
        ({"line": ""}, "no line with 'the cause'"),
        ({"kept": ""}, "no checkpoint is left"),
        ({"output": "Traceback (most recent call last):"}, "there is a traceback"),
    ],
)
def test_an_ending_that_is_not_as_expected_is_a_problem(changes, problem):
    values = {name: getattr(ENDING, name) for name in ("exit_code", "line", "kept", "output")}
    assert script.Ending(**(values | changes)).problems(SCENARIO) == [problem]


def test_titles_are_unique():
    assert len({one.title for one in SCENARIOS}) == len(SCENARIOS)
