"""Cells of csv and parquet files are read as they are, and faults are named."""

import csv
import json
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import run_program

from lit_grpo.data.rows.sources import read_rows
from lit_grpo.types import UserError

NESTED = {"text": 'é, "q"\nline', "tags": ["a", "b"], "meta": {"scores": [0.5, None], "n": 3}}


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_a_parquet_column_whose_type_is_json_holds_objects(tmp_path):
    texts = ['[{"criterion": "short", "weight": 2}]', None, '{"criteria": []}', '"plain"']
    table = pa.table({"rubric": pa.array(texts), "text": pa.array(texts)})
    schema = pa.schema({"rubric": pa.json_(), "text": pa.string()})
    pq.write_table(table.cast(schema), tmp_path / "data.parquet")
    rows = read_rows(str(tmp_path / "data.parquet"))
    expected = [[{"criterion": "short", "weight": 2}], None, {"criteria": []}, "plain"]
    assert [row.columns["rubric"] for row in rows] == expected
    assert [row.columns["text"] for row in rows] == texts


def test_nested_columns_survive_parquet_as_plain_python(tmp_path):
    path = tmp_path / "data.parquet"
    pd.DataFrame([NESTED, {**NESTED, "tags": None}]).to_parquet(path)
    rows = read_rows(str(path))
    assert [row.columns for row in rows] == [NESTED, {**NESTED, "tags": None}]
    assert json.loads(json.dumps(rows[0].columns)) == NESTED
    assert [row.id for row in rows] == ["data:1", "data:2"]


def test_an_incomplete_parquet_file_is_refused_by_name(tmp_path):
    path = tmp_path / "data.parquet"
    pd.DataFrame([NESTED]).to_parquet(path)
    write(path, path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"data\.parquet is not a complete parquet file"):
        read_rows(str(path))


def test_a_parquet_file_that_is_damaged_inside_is_refused_by_name(tmp_path):
    path = tmp_path / "data.parquet"
    pd.DataFrame({"text": [f"row {number * 7919}" for number in range(2000)]}).to_parquet(path)
    whole = path.read_bytes()
    write(path, whole[:500] + bytes(500) + whole[1000:])
    with pytest.raises(ValueError, match=r"data\.parquet is not a complete parquet file"):
        read_rows(str(path))


def test_csv_cells_are_text_as_written_and_empty_ones_are_none(tmp_path):
    path = tmp_path / "t.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["q", "zip"], ['a, "b"\nc', "007"], ["None", ""]])
    assert [row.columns for row in read_rows(str(path))] == [
        {"q": 'a, "b"\nc', "zip": "007"},
        {"q": "None", "zip": None},
    ]


@pytest.mark.parametrize(
    ("line", "fix"),
    [("1,2,3", "Put cells that contain commas into"), ("1", "Write a comma for each empty cell")],
)
def test_a_csv_row_with_too_many_or_too_few_cells_is_named(tmp_path, line, fix):
    path = write(tmp_path / "t.csv", f'q,a\n"x\ny",1\n{line}\n')
    cells = len(line.split(","))
    with pytest.raises(
        ValueError, match=rf"t\.csv, row 2 \(line 4\) has {cells} cells.* 2 col.*{fix}"
    ):
        read_rows(path)


def test_a_csv_quote_that_is_never_closed_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"t\.csv, line 2 is not csv"):
        read_rows(write(tmp_path / "t.csv", 'q,a\n"x,1\n'))


def test_a_csv_in_another_encoding_is_refused_with_the_line(tmp_path):
    with pytest.raises(ValueError, match=r"t\.csv, line 3 is not UTF-8"):
        read_rows(write(tmp_path / "t.csv", b"q,a\nx,1\ncaf\xe9,2\n"))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("prompt;answer\n1+1=;2\n", "semicolons"),
        ("prompt\tanswer\n1, or 2?\t2\n", "tabs"),
        ('"prompt";"answer, if any"\r\n"a; b";2\r\n', "semicolons"),
    ],
)
def test_a_csv_with_another_separator_is_named_and_the_command_given_converts_it(
    content, named, tmp_path
):
    path = write(tmp_path / "t.csv", content)
    with pytest.raises(UserError, match=rf"t\.csv: columns .*, has {named} and no comma") as raised:
        read_rows(path)
    command = str(raised.value).partition("convert it: ")[2]
    run_program(["sh", "-c", command.replace("python", sys.executable, 1)])
    (row,) = read_rows(str(tmp_path / "t_commas.csv"))
    assert list(row.columns.values())[1] == "2"
    assert len(row.columns) == 2


def test_a_csv_with_one_column_may_have_any_text(tmp_path):
    (row,) = read_rows(write(tmp_path / "t.csv", 'prompt\n"a; b\tc"\n'))
    assert dict(row.columns) == {"prompt": "a; b\tc"}
    (row,) = read_rows(write(tmp_path / "t.csv", '"prompt; in full"\na\n'))
    assert dict(row.columns) == {"prompt; in full": "a"}


def test_a_duplicate_csv_column_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must be unique, got \['a'\] more than once"):
        read_rows(write(tmp_path / "t.csv", "a,b,a\n1,2,3\n"))


def test_columns_of_numbers_in_a_csv_file_are_named_since_they_are_text(tmp_path, caplog):
    cells = {
        "prompt": ["a", "b"], "level": ["3", ""], "score": ["-0.5", "1.50"], "zip": ["020", "4"],
        "mixed": ["1", "two"], "none": ["", ""], "other": ["1e5", "nan"],
    }  # fmt: skip
    with caplog.at_level("INFO"):
        path = write(tmp_path / "t.csv", pd.DataFrame(cells).to_csv(index=False))
        first, _ = read_rows(path)
        read_rows(write(tmp_path / "u.csv", "prompt,answer\na,b\n"))
    assert first.columns["level"] == "3"
    (said,) = caplog.messages
    assert said.startswith(f"{path}: the cells of a csv file are text, also in level, score, zip: ")
    assert "a reward function gets '3', and converts it" in said
