"""Which votes are missing: of each answer to a question once, in calls of several answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stored_answers import (
    PRECOMPUTE,
    PREPARE,
    asked,
    write_rows,
)

from lit_grpo.__main__ import main
from lit_grpo.cli.precompute.votes import missing_calls
from lit_grpo.cli.prepare.gold_cache import JudgeVotes
from lit_grpo.cli.prepare.join_gold import vote_key
from lit_grpo.cli.prepare.recipe import Gold
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.data.rows.prepared import find_prepared


def row(number, *answers, **columns):
    return PreparedRow(
        origin="",
        id=f"open:{number}",
        source="open",
        kind="open",
        text_hash="",
        columns={"prompt": f"Why {number}?", "answers": answers, **columns},
    )


def listed(rows, cache, **gold):
    """Each missing call as its vote and its answers."""
    calls = missing_calls(rows, Gold(num_evals=2, **gold), cache)
    return [(call.vote, "".join(call.answers.values())) for call in calls]


def test_a_call_has_one_vote_on_some_answers_to_one_question(tmp_path):
    rows = [row(0, "a", "b", "c"), row(1, "d", "e")]
    found = listed(rows, JudgeVotes(tmp_path), answers_per_call=2)
    assert found == [(0, "ab"), (0, "c"), (1, "ab"), (1, "c"), (0, "de"), (1, "de")]


def test_an_answer_is_missing_until_it_has_each_of_its_votes(tmp_path):
    cache = JudgeVotes(tmp_path)
    for number, vote in enumerate((0, 1, 1)):
        cache.add(vote_key(row(0), "aab"[number]), vote, 5, 0.0)
    cache.refresh()
    assert listed([row(0, "a", "b", "c")], cache, answers_per_call=3) == [(0, "bc"), (1, "c")]
    cache.close()


def test_only_an_answer_to_the_same_question_is_asked_about_once(tmp_path):
    rows = [row(0, "a", "b"), row(0, "b", "c"), row(1, "b")]
    found = [answers for vote, answers in listed(rows, JudgeVotes(tmp_path)) if vote == 0]
    assert found == ["a", "b", "c", "b"]


@pytest.mark.parametrize(("is_shown", "reference"), [(True, "2"), (False, None)])
def test_the_judge_sees_the_question_and_the_reference_if_it_may(is_shown, reference, tmp_path):
    rows = [row(0, "a", question="1+1?", answer="2", rubric="short")]
    gold = Gold(num_evals=1, highest=5, show_reference=is_shown)
    (call,) = missing_calls(rows, gold, JudgeVotes(tmp_path))
    about = {"question": "1+1?", "reference": reference, "rubric": "short", "highest": 5}
    assert call.context == about


def test_copies_of_a_row_are_neither_counted_nor_asked_twice(server, capsys):
    write_rows(2)
    twice = Path("rows.jsonl").read_text() * 2
    Path("rows.jsonl").write_text(twice)
    assert main([*PRECOMPUTE, "--dry_run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["rows"], plan["calls"], plan["votes"]) == (4, 18, 18)
    assert main([*PRECOMPUTE]) == 0
    assert capsys.readouterr().out.startswith("18 votes recorded for 4 rows; 0 are missing")
    assert set(asked(server).values()) == {3}


def test_rows_with_scores_or_without_two_answers_are_not_asked(server, capsys):
    rows = [
        {"question": "Why?", "answers": ["a", "b"], "gold_scores": [1, 0]},
        {"question": "How?", "answers": ["a"]},
        {"question": "What?", "answers": []},
        {"question": "Who?"},
        {"question": "When?", "answers": ["a", "c"]},
    ]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main([*PRECOMPUTE]) == 0
    assert asked(server) == {"a": 3, "c": 3}
    out = capsys.readouterr().out
    assert "3 rows have fewer than two answers and cannot be compared" in out
    assert main([*PREPARE]) == 2
    assert "3 of 5 rows have no gold scores" in capsys.readouterr().err
    assert main([*PREPARE, "--only_cached"]) == 0
    assert len(find_prepared("out").split("train").rows()) == 2
