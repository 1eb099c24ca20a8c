"""What is printed of missing votes, of their cost and of what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

from stored_answers import (
    PRECOMPUTE,
    PREPARE,
    write_recipe,
)

from lit_grpo.__main__ import main


def test_without_a_price_no_cost_is_claimed(server, capsys):
    write_recipe(server, judge={"price": None})
    assert main([*PRECOMPUTE, "--limit", "1", "--dry_run"]) == 0
    assert "unknown: no price" in capsys.readouterr().out
    assert main([*PRECOMPUTE, "--limit", "1"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "9 votes recorded for 1 rows; 0 are missing"


def test_data_that_have_all_their_scores_are_said_to_lack_nothing(server, capsys):
    rows = [
        {"question": f"Describe hill {n}.", "answers": ["a", "b"], "gold_scores": [1, 0]}
        for n in range(3)
    ]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main([*PREPARE]) == 0
    capsys.readouterr()
    given = "3 rows have gold scores in the data: nothing is missing for them\n"
    words = [*PRECOMPUTE, "--prepared", "out", "--cache", "absent"]
    assert main([*words, "--dry_run"]) == 0
    assert capsys.readouterr().out == given
    assert main(words) == 0
    shown, _, advised = capsys.readouterr().out.partition("next: lit-grpo ")
    assert shown == given
    assert main(advised.split()) == 0
