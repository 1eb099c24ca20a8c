"""Which rows of a source are kept, and what is said of the others."""

from __future__ import annotations

import hashlib
import json

import pytest

from lit_grpo.cli.prepare.collect import collect
from lit_grpo.cli.prepare.recipe import RecipeSource
from lit_grpo.types import UserError


def write(name, *rows):
    """Write a file into the working directory."""
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    with open(name, "w") as file:
        file.write(text)
    return text.encode()


def collected(*files, bad_rows="refuse", recipe="mine.yaml", kind="verifiable", **settings):
    source = RecipeSource(kind=kind, data=[*files], **settings)
    return collect("sums", source, bad_rows, recipe)


def test_the_rows_of_all_files_are_read_and_each_file_is_known_by_its_bytes():
    one = write("one.jsonl", {"prompt": "1+1?", "answer": "2"}, {"prompt": "1+2?", "answer": "3"})
    two = write("two.jsonl", {"prompt": "1+3?", "answer": "4"})
    found = collected("one.jsonl", "two.jsonl")
    assert [row.columns["answer"] for row in found.rows] == ["2", "3", "4"]
    assert len({row.id for row in found.rows}) == found.num_read == 3
    assert found.files == [
        {"name": name, "sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
        for name, text in (("one.jsonl", one), ("two.jsonl", two))
    ]


def test_a_row_that_no_filter_keeps_is_counted_under_the_first_that_drops_it():
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1), "level": n % 3} for n in range(6)]
    write("rows.jsonl", *rows)
    found = collected("rows.jsonl", where={"level": [0, 1], "answer": ["1", "2"]})
    assert [row.columns["answer"] for row in found.rows] == ["1", "2"]
    assert found.dropped == {"filter level": 2, "filter answer": 2}


def test_of_rows_that_cannot_be_used_the_first_is_refused_or_all_are_dropped():
    rows = [{"prompt": "1+1?", "answer": "2"}, {"prompt": " ", "answer": "3"}, {"prompt": "1+3?"}]
    write("rows.jsonl", *rows)
    refused = r"rows\.jsonl, row 2 of source sums cannot be used: .* drop such rows with --bad_rows"
    with pytest.raises(UserError, match=refused):
        collected("rows.jsonl")
    found = collected("rows.jsonl", bad_rows="drop")
    assert (len(found.rows), found.num_read) == (1, 3)
    assert found.dropped == {"no prompt": 1, "no gold answer": 1}


def test_a_source_whose_rows_are_all_dropped_is_refused_with_the_reasons():
    write("rows.jsonl", {"prompt": "1+1?", "answer": "2"}, {"prompt": "", "answer": "2"})
    words = r"sums has no row left of 2 \(no prompt: 1, filter answer: 1\)\. Change sources\.sums"
    with pytest.raises(UserError, match=words):
        collected("rows.jsonl", bad_rows="drop", where={"answer": "3"})


@pytest.mark.parametrize(
    ("recipe", "fix"),
    [
        ("mine.yaml", r"Set sources\.sums\.columns: \{answer: NAME\}\."),
        ("verifiable_only", r"Set --preset to a file of your own with \{description: mine, "),
    ],
)
def test_a_column_that_is_not_there_is_named_with_what_to_set(recipe, fix):
    write("rows.jsonl", {"prompt": "1+1?", "label": "2"})
    what = rf"must have the column 'gold', from which {recipe} takes the answer of the source sums"
    with pytest.raises(UserError, match=f"{what}, got prompt, label. {fix}"):
        collected("rows.jsonl", columns={"answer": "gold"}, recipe=recipe)


def test_a_damaged_file_is_named_with_its_source_and_how_to_read_others():
    with open("rows.parquet", "wb") as file:
        file.write(b"x")
    said = r"the source 'sums' of verifiable_only cannot be read: rows\.parquet .* --data sums=FILE"
    with pytest.raises(UserError, match=said):
        collected("rows.parquet", recipe="verifiable_only")
