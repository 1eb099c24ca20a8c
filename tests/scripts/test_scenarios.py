"""The table of training runs that fail on purpose, with few of them, and what it would notice."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import scenarios as script
from _scenario import Scenario
from _scenario_list import SCENARIOS
from forked_ranks import Forked
from paths import ROOT, TESTS

from lit_grpo.diagnostics.causes.table import CAUSES

SCENARIO = Scenario(
    title="x",
    cause="no_reward",
    event="stop",
    says="the cause",
    ends=r"stopped after (\d+) steps",
    exit_code=3,
    keeps=4,
)
KEPT = script.Kept(
    step=4,
    num_rows=5,
    completions=frozenset({0, 1, 2, 3, 4}),
    has_final=False,
    events=frozenset({("start", ""), ("stop", "no_reward")}),
)
OUTPUT = "run directory: run\n12:00:00 the cause\nstopped after 4 steps\n"
ENDING = script.Ending(exit_code=3, kept=KEPT, output=OUTPUT)


BY_COMMAND = ("wrong credentials of the judge", "SIGTERM")
COVERED = {
    "a reward that never returns": "runs/shutdown/test_watchdog.py: "
    "test_a_reward_that_deadlocks_ends_the_run_with_its_own_code_and_a_checkpoint",
    "an oversized first step": "runs/shutdown/test_watchdog.py: "
    "test_a_slow_first_step_that_advances_is_not_stopped",
    "the time is up": "runs/shutdown/test_time_limit.py: "
    "test_max_time_ends_a_run_with_its_reason_and_does_not_queue_it_again",
    "the disk is full while saving": "end_to_end/test_first_hour.py: "
    "test_a_full_disk_is_one_line_and_the_run_goes_on_elsewhere",
    "SIGKILL, then --ckpt_path auto": "end_to_end/test_resume.py: "
    "test_a_run_that_is_killed_or_asked_to_end_resumes_bit_identically",
    "wandb's service is killed": "runs/test_wandb_teardown.py: "
    "test_a_run_survives_the_death_of_the_wandb_service",
    "wandb's service hangs": "runs/test_wandb_teardown.py: "
    "test_a_run_survives_a_wandb_service_that_hangs",
}
"""Scenarios that take long, and the tests that have the same."""
OTHERS = {
    one.title: one
    for one in SCENARIOS
    if one.needs is None and one.title not in {*BY_COMMAND, *COVERED}
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_runs_scenarios_and_prints_a_row_for_each(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scenarios.py", *BY_COMMAND, "--markdown"])
    assert script.main() == 0
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| what happens | cause | what the user reads first | exit code |")
    assert rule == "| --- | --- | --- | --- | --- | --- |"
    assert len(rows) == 2
    assert all(row.endswith("| yes |") for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("title", OTHERS)
def test_a_scenario_ends_as_it_must(title, tmp_path, importer):
    scenario = OTHERS[title]

    def start_forked(command, directory, environment, said) -> Forked:
        python, _, module, *words = command
        assert (python, module) == (sys.executable, "lit_grpo")
        return importer.start(words, directory, said, **environment)

    start = script.start_program if scenario.environment else start_forked  # glibc reads it once
    ending = script.run_scenario(scenario, tmp_path / "scenario", start)
    assert ending.problems(scenario) == [], ending.output


@pytest.mark.parametrize("title", COVERED)
def test_a_scenario_that_is_left_out_is_that_of_another_test(title):
    file, test = COVERED[title].split(": ")
    assert title in {one.title for one in SCENARIOS}
    assert f"def {test}(" in (TESTS / file).read_text()


def test_the_table_of_the_docs_has_the_scenarios_of_today_and_all_end_as_they_must():
    text = (ROOT / "docs" / "scenarios.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    heads, _, *rows = lines
    assert tuple(heads) == script.HEADS
    expected = [
        (one.title, script.link(CAUSES[one.cause], script.TROUBLESHOOTING), str(one.exit_code))
        for one in SCENARIOS
    ]
    assert [(row[0], row[1], row[3]) for row in rows] == expected, "run python scripts/scenarios.py"
    assert {row[-1] for row in rows} == {"yes"}
    for one, row in zip(SCENARIOS, rows, strict=True):
        assert re.search(r"\d+ steps", row[4]) or one.keeps is None, row
        assert one.keeps in (None, script.SOME) or f"of {one.keeps} steps" in row[4], row


def test_every_scenario_has_a_cause_of_the_table():
    assert {one.cause for one in SCENARIOS} <= CAUSES.keys()


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
        (
            {"kept": replace(KEPT, events=frozenset({("alert", "no_reward")}))},
            "no event 'stop' is due to no_reward",
        ),
        ({"output": f"{OUTPUT}Traceback (most recent call last):"}, "there is a traceback"),
    ],
)
def test_an_ending_that_is_not_as_expected_is_a_problem(changes, problem):
    problems = replace(ENDING, **changes).problems(SCENARIO)
    assert any(one.startswith(problem) for one in problems)


def test_titles_are_unique():
    assert len({one.title for one in SCENARIOS}) == len(SCENARIOS)
