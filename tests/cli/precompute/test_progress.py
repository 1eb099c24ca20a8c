"""The progress says how many votes are there, how fast, what failed, what it cost, what is left."""

from __future__ import annotations

import pytest
from judge_server import JudgeServer
from stored_answers import by_last_letter, write_recipe, write_rows
from terminal import shown_in_terminal

from lit_grpo.__main__ import main
from lit_grpo.cli.precompute import progress
from lit_grpo.cli.precompute.progress import VoteProgress
from lit_grpo.cli.prepare.gold_cache import JudgeVotes


@pytest.fixture
def votes(here):
    votes = JudgeVotes(here / "gold")
    votes.add("a", 0, 7, 1.5)
    votes.add("a", 1, None, 0.25)
    votes.refresh()
    yield votes
    votes.close()


def test_the_note_has_rate_failures_costs_and_time_left(votes):
    shown = VoteProgress(votes, num_missing=1000, has_price=True)
    assert shown.note(0, 0, 0.0) == "0.0/s  0 failed  $1.75"
    assert shown.note(200, 100, 100.0) == "2.0/s  100 failed  $1.75  6 min left"
    assert shown.note(900, 100, 60.0) == "15/s  100 failed  $1.75"
    free = VoteProgress(votes, num_missing=1000, has_price=False)
    assert free.note(100, 0, 10_000.0) == "0.0/s  0 failed  25.0 h left"


def test_without_a_terminal_a_line_comes_now_and_then(here, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    with JudgeServer(by_last_letter) as server:
        write_rows(2)
        write_recipe(server)
        assert main(["precompute", "--preset", "mine.yaml"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 18
    assert lines[-1].startswith("votes 18/18 ")
    assert lines[-1].endswith("/s  0 failed  $0.00")


@pytest.mark.slow
def test_a_terminal_shows_a_bar(here, importer):
    with JudgeServer(by_last_letter) as server:
        write_rows(8)
        write_recipe(server)
        lines = shown_in_terminal(importer, "precompute", "--preset", "mine.yaml", cwd=here)
    bars = [line for line in lines if line.startswith("votes ━")]
    assert any("72/72" in line and "0 failed  $0.01" in line for line in bars)
    assert any(line.endswith(" left") for line in map(str.strip, bars))
    assert lines[-3].startswith("72 votes recorded for 8 rows; 0 are missing")
