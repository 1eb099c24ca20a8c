"""Nested columns come out of parquet as they went in, whoever reads it."""

from __future__ import annotations

import json

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.data.rows.schema import find_schema, write_parquet
from lit_grpo.data.rows.sources import read_rows
from lit_grpo.types import UserError

CALL = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
ROWS = [
    {
        "id": "a",
        "messages": [{"role": "user", "content": "What is 1+1?"}],
        "gold_scores": [1, 0.5],
        "rubric": [{"criterion": "is 2", "weight": 2}, {"criterion": "is short", "weight": 1}],
        "facts": {"unit": "km"},
        "flags": [True],
        "nothing": None,
        "empty": [],
    },
    {
        "id": "b",
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ],
        "gold_scores": [0.25, 0.125],
        "rubric": [{"criterion": "has a unit", "weight": 0.5}],
        "facts": {"height": 3, "parts": [1, "two", None]},
        "flags": None,
        "nothing": None,
        "empty": [],
    },
]


def write(rows, path, **columns):
    named = [(f"row {n}", row) for n, row in enumerate(rows, 1)]
    schema = find_schema(named, columns)
    write_parquet(path, named, schema)
    return schema


def without_nulls(row):
    return {name: value for name, value in row.items() if value is not None}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("schema") / "rows.parquet"
    write(ROWS, path, id=pa.string())
    return path


def test_dicts_of_one_shape_have_a_type_and_others_are_json(path):
    schema = pq.read_schema(path)
    assert schema.names == ["id", "empty", "facts", "flags", "gold_scores", "messages", "rubric"]
    assert schema.field("rubric").type == pa.list_(
        pa.struct({"criterion": pa.string(), "weight": pa.float64()})
    )
    assert schema.field("messages").type == schema.field("facts").type == pa.json_()
    assert schema.field("gold_scores").type == pa.list_(pa.float64())


def test_rows_are_read_as_they_were_by_our_reader(path):
    assert [row.columns for row in read_rows(str(path))] == [
        {name: value for name, value in row.items() if name != "nothing"} for row in ROWS
    ]


def test_rows_are_read_as_they_were_by_pyarrow_and_pandas_with_json_as_text(path):
    of_json = {"messages", "facts"}
    for found in (pq.read_table(path).to_pylist(), pd.read_parquet(path).to_dict("records")):
        for row, expected in zip(found, ROWS, strict=True):
            for name, value in row.items():
                plain = json.loads(value) if name in of_json else value
                plain = plain.tolist() if hasattr(plain, "tolist") else plain
                assert plain == expected[name], name


def test_rows_are_read_as_they_were_by_datasets(path, tmp_path):
    found = datasets.Dataset.from_parquet(str(path), cache_dir=tmp_path)
    assert [without_nulls(row) for row in found] == [without_nulls(row) for row in ROWS]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS
NESTED = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)
OBJECTS = st.lists(NESTED, max_size=3) | st.dictionaries(TEXTS, NESTED, max_size=3)


@settings(max_examples=200)
@given(st.lists(st.fixed_dictionaries({"one": st.none() | OBJECTS, "other": TEXTS}), min_size=1))
def test_any_nested_values_survive(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    write(rows, path)
    read = [dict(row.columns) for row in read_rows(str(path))]
    assert [{"one": None} | row for row in read] == rows


def test_the_same_rows_are_the_same_bytes(tmp_path):
    many = [{"id": str(n), "value": {"n": n} if n % 3 else {"m": "x"}} for n in range(10_001)]
    for name in ("a", "b"):
        write(many, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert pq.ParquetFile(tmp_path / "a").num_row_groups == 2


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (
            3,
            "x",
            r"v must have values of one type, got a whole number \(3\) in row 1 and the string",
        ),
        (True, 1, r"got true or false \(True\) in row 1 and a whole number \(1\) in row 2"),
        ({"a": 1}, "x", r"got an object in row 1 and the string 'x' in row 2"),
        ("x", ["x"], r"got the string 'x' in row 1 and a list in row 2 \(a column of parquet has"),
        (1, 2**70, r"row 2: v cannot be written: .* Repair the row"),
        ({"a": 1.0}, {"a": float("nan")}, r"row 2: v cannot be written: .*nan.* is no JSON"),
    ],
)
def test_a_column_with_values_of_different_types_is_refused_with_two_rows(one, other, message):
    with pytest.raises(UserError, match=message):
        find_schema([("row 1", {"v": one}), ("row 2", {"v": other})], {})


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"a": [float("nan")]}, {"b": 1}, r"row 1: v cannot be written: .*float values"),
        ([1], ["x", [float("inf")]], r"row 2: v cannot be written: .*float values"),
        (0.5, 2**60 + 1, r"row 2: v cannot be written: Integer value 1152921504606846977"),
        ("x", "\ud800", r"row 2: v cannot be written: .*surrogates not allowed"),
    ],
)
def test_a_value_that_its_column_cannot_have_is_named(one, other, message, tmp_path):
    with pytest.raises(UserError, match=message):
        write([{"v": one}, {"v": other}], tmp_path / "file")


def test_whole_numbers_and_fractions_are_numbers():
    for values in ((1, 0.5), (0.5, 1)):
        schema = find_schema([("r", {"v": value}) for value in values], {})
        assert schema.field("v").type == pa.float64()
