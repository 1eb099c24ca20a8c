"""Files that no data can be made of: one line with the file, the row and what to do."""

import json
import os
import re
import shutil

import pandas as pd
import pytest
import yaml
from prepared_data import open_row

from lit_grpo.__main__ import main
from lit_grpo.data.rows import json_lines


def lines(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def stored(number: int, **changes) -> dict:
    row = {name: open_row(number)[name] for name in ("question", "answers", "gold_scores")}
    return row | changes


def truncated_parquet(here):
    pd.DataFrame([stored(n) for n in range(9)]).to_parquet(here / "open.parquet")
    whole = (here / "open.parquet").read_bytes()
    (here / "open.parquet").write_bytes(whole[: len(whole) // 2])


def other_encoding(here):
    row = '{"question": "Où?", "answers": ["là", "ici"], "gold_scores": [0, 1]}\n'
    (here / "open.jsonl").write_bytes(2 * row.encode("latin-1"))


def scores_of(*values):
    return lambda here: lines(here / "open.jsonl", stored(0), stored(1, gold_scores=[*values]))


def mixed_types(here):
    rows = [stored(n, level=n if n < 4 else "high") for n in range(8)]
    lines(here / "open.jsonl", *rows)


def repeated_ids(here):
    lines(here / "open.jsonl", stored(0, key="a"), stored(1, key="b"), stored(2, key="a"))


CASES = {
    "truncated parquet": (truncated_parquet, {}, r"open.parquet is not a complete parquet file"),
    "another encoding": (other_encoding, {}, r"open.jsonl, row 1 is not UTF-8"),
    "a score that is not a number": (
        scores_of(0.1, float("nan"), 0.2),
        {},
        r"open.jsonl, row 2 .*gold_scores\[1\] is nan, not a finite number",
    ),
    "an infinite score": (
        scores_of(0.1, float("inf"), 0.2),
        {},
        r"open.jsonl, row 2 .*is inf, not a finite number",
    ),
    "a score too few": (
        scores_of(0.1, 0.2),
        {},
        r"open.jsonl, row 2 .*2 values but answers holds 3",
    ),
    "types that differ": (mixed_types, {}, r"level must have values of one type, got .*row"),
    "ids that repeat": (
        repeated_ids,
        {"columns": {"id": "key"}},
        r"open.jsonl, row 3.*open.jsonl, row 1|open.jsonl, row 1.*open.jsonl, row 3",
    ),
    "an empty file": (lambda here: lines(here / "open.jsonl"), {}, r"open.jsonl is empty"),
    "a line that is too long": (
        lambda here: lines(here / "open.jsonl", stored(0), stored(1, note="x" * 3000)),
        {},
        r"open.jsonl, row 2 has a line of more than 0.002 MB",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_cannot_be_used_is_named_with_its_row_and_nothing_is_written(
    name, here, capsys, monkeypatch
):
    write, source, message = CASES[name]
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 2000)
    write(here)
    (file,) = here.glob("open.*")
    columns = {"gold_scores": "gold_scores"} | source.get("columns", {})
    recipe = {
        "description": "x",
        "holdout_size": 1,
        "sources": {"open": {"kind": "open", "data": file.name, "columns": columns}},
    }
    (here / "mine.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["prepare", "--preset", "mine.yaml", "--out", "out"]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert re.search(message, said.err), said.err
    assert sorted(os.listdir(here)) == sorted(["mine.yaml", file.name])


def prepare_verifiable(here, *rows, **columns):
    """Prepare rows of a parquet file by a recipe with one source, in which arguments follow."""
    pd.DataFrame(rows).to_parquet(here / "sums.parquet")
    source = {"kind": "verifiable", "data": "sums.parquet", "columns": columns}
    (here / "mine.yaml").write_text(
        yaml.safe_dump({"description": "x", "sources": {"sums": source}})
    )
    return ["prepare", "--preset", "mine.yaml", "--out", "out"]


def test_a_file_without_any_prompt_is_told_to_name_the_column(here, capsys):
    command = prepare_verifiable(here, {"text": "1 + 1?", "label": "2"}, answer="label")
    assert main(command) == 2
    assert capsys.readouterr().err == (
        "error: sums.parquet has no column that is recognised as the prompt; it has text, label. "
        "Set sources.sums.columns: {prompt: NAME}.\n"
    )
    command = prepare_verifiable(here, {"text": "1 + 1?"}, prompt="txt")
    assert main(command) == 2
    assert "got text. Set sources.sums.columns: {prompt: NAME}.\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mine.yaml", "named"])
def test_of_an_own_recipe_it_is_not_said_how_to_read_own_rows(here, capsys, name):
    command = prepare_verifiable(here, {"prompt": "1 + 1?", "answer": "2"})
    (here / "configs/data").mkdir(parents=True)
    shutil.copy(here / "mine.yaml", here / "configs/data/named.yaml")
    (here / "sums.parquet").write_bytes(b"x")
    command[command.index("mine.yaml")] = name
    assert main(command) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: the source 'sums' of {name} cannot be read: sums.parquet is")
    assert shown.endswith("Write it again.\n")


@pytest.mark.parametrize("answer", [b"\xff1", {"v": 0}, [["1"]]])
def test_an_answer_that_is_no_text_is_named_with_its_row_and_may_be_dropped(here, capsys, answer):
    rows = [{"prompt": f"{n} + 1?", "answer": answer if n == 2 else None} for n in range(4)]
    command = prepare_verifiable(here, *rows)
    assert main(command) == 2
    shown = capsys.readouterr().err
    assert "sums.parquet, row 3 of source sums cannot be used: the answer column 'answer'" in shown
    assert "must hold text, a number or a list of these, got the" in shown
    assert not (here / "out").exists()
    assert main([*command, "--bad_rows", "drop"]) == 0
    assert "unusable gold answer: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bad", "columns", "fault", "dropped"),
    [
        (b"1", {"id": "key"}, "an id must be text or a number, got the bytes b'1'", "unusable id"),
        (b"1", {}, "an id must be text or a number, got the bytes b'1'", "unusable id"),
        (" ", {"id": "key"}, "the column 'key' is null, empty or missing", "no id"),
    ],
    ids=["bytes", "bytes in a column called id", "blank"],
)
def test_an_id_that_is_no_text_is_refused_with_its_row_and_may_be_dropped(
    here, capsys, bad, columns, fault, dropped
):
    name = columns.get("id", "id")
    row = {"prompt": "a", "answer": "1", name: bad}
    command = prepare_verifiable(here, row, **columns)
    assert main(command) == 2
    assert f"row 1 of source sums cannot be used: {fault}. Repair" in capsys.readouterr().err
    assert main([*command, "--bad_rows", "drop"]) == 2
    assert f"source sums has no row left of 1 ({dropped}: 1)" in capsys.readouterr().err


def test_duplicates_whose_answers_contradict_each_other_are_named(here, capsys):
    rows = [{"prompt": f"{n % 5} + 1?", "answer": str(n % 5 + 1)} for n in range(7)]
    command = prepare_verifiable(here, *rows)
    assert main(command) == 0
    assert "contradict" not in capsys.readouterr().err
    rows[6]["answer"] = "9"
    command = prepare_verifiable(here, *rows)
    for action, kept in (("drop", "the first is kept"), ("report", "both are kept")):
        assert main([*command, "--duplicates", action]) == 0
        said = capsys.readouterr().err
        assert said.startswith("1 exact duplicate with another gold answer, such as '")
        assert {"'2' in sums.parquet, row 2", "'9' in sums.parquet, row 7"} == set(
            re.findall(r"'\d' in sums.parquet, row \d", said)
        )
        assert f"they contradict each other, and {kept}." in said


def test_a_file_in_place_of_the_directory_is_called_a_file(here, capsys):
    command = prepare_verifiable(here, {"prompt": "1 + 1?", "answer": "2"})
    (here / "out").write_text("mine")
    assert main(command) == 2
    assert "prepared data, got a file (it would be lost)" in capsys.readouterr().err
    assert (here / "out").read_text() == "mine"


def test_a_recipe_whose_suffix_is_missing_is_suggested(here, capsys):
    prepare_verifiable(here, {"prompt": "1 + 1?", "answer": "2"})
    assert main(["prepare", "--preset", "mine", "--out", "out"]) == 2
    assert "mine: no such recipe. Did you mean mine.yaml?" in capsys.readouterr().err


def test_a_source_whose_weight_cannot_be_met_is_named(here, capsys):
    lines(here / "few.jsonl", *(stored(n) for n in range(6)))
    lines(here / "many.jsonl", *(stored(n) for n in range(6, 60)))
    recipe = {
        "description": "x",
        "holdout_size": 2,
        "size": 40,
        "sources": {
            name: {
                "kind": "open",
                "data": f"{name}.jsonl",
                "weight": weight,
                "columns": {"gold_scores": "gold_scores"},
            }
            for name, weight in (("few", 0.5), ("many", 0.5))
        },
    }
    (here / "mine.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["prepare", "--preset", "mine.yaml", "--out", "out"]) == 2
    assert "few" in capsys.readouterr().err
    assert not (here / "out").exists()
