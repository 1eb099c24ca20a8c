"""Files and datasets become rows that know their origin, or an error that names it."""

import gzip
import json
from pathlib import Path

import pytest

from lit_grpo.data.rows.sources import read_rows
from lit_grpo.types import UserError


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_jsonl_rows_are_numbered_by_line_and_blank_lines_are_skipped(tmp_path):
    path = write(tmp_path / "train.jsonl", '\ufeff{"a": 1}\n\n{"a": "x\u2028y"}\r\n')
    rows = read_rows(path)
    assert [row.columns for row in rows] == [{"a": 1}, {"a": "x\u2028y"}]
    assert [row.id for row in rows] == ["train:1", "train:3"]
    assert rows[1].origin == f"{path}, row 3"


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b'{"a": 1}\n'), "is gzip, whatever its suffix says. Unpack it"),
        (b"PAR1\x15\x04", "is parquet, whatever its suffix says. Rename it"),
        (b"PK\x03\x04\x14\x00", "is a zip archive or a spreadsheet"),
    ],
    ids=["gzip", "parquet", "zip"],
)
def test_a_file_of_another_format_than_its_suffix_is_told_which(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_rows(str(tmp_path / name))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(("name", "text"), [("t.jsonl", '{"a": 1}\n'), ("t.csv", "q,a\nx,1\n")])
def test_a_file_in_utf_16_is_called_so(tmp_path, encoding, name, text):
    path = write(tmp_path / name, text.encode(encoding))
    with pytest.raises(ValueError, match=rf"{name} is UTF-16, and only UTF-8 is read"):
        read_rows(path)


@pytest.mark.parametrize(
    ("name", "content"), [("t.jsonl", ""), ("t.jsonl", "\n\n"), ("t.csv", ""), ("t.csv", "q,a\n")]
)
def test_an_empty_file_is_refused(tmp_path, name, content):
    with pytest.raises(ValueError, match=rf"{name} is empty: it has no rows"):
        read_rows(write(tmp_path / name, content))


def test_a_missing_file_is_refused_with_the_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"no such file \(looked for {tmp_path}/d/t\.jsonl\)"):
        read_rows("d/t.jsonl")


def test_a_directory_that_is_called_like_a_file_is_said_to_be_one(tmp_path):
    (tmp_path / "t.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"t\.jsonl is a directory, but .* ends in \.jsonl must "):
        read_rows(str(tmp_path / "t.jsonl"))


def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.jsonl, \.parquet, \.csv, got '\.dat'"):
        read_rows(write(tmp_path / "t.dat", "[]"))


def test_json_is_refused_with_the_command_that_converts_it_or_to_be_renamed(tmp_path):
    row = {"prompt": "1+1=", "answer": "2"}
    for text in (json.dumps([row]), "\n" + json.dumps([row], indent=2)):
        with pytest.raises(UserError, match=r"t\.json is one JSON array, .* Convert it: ") as e:
            read_rows(write(tmp_path / "t.json", text))
        exec(str(e.value).partition('python -c "')[2].removesuffix('"'))
    for name in ("t.jsonl", "t_lines.jsonl"):  # the second conversion replaces nothing
        assert read_rows(str(tmp_path / name))[0].columns == row
    with pytest.raises(UserError, match=r"got '\.json' .* rename it to end in \.jsonl\."):
        read_rows(write(tmp_path / "t.json", json.dumps(row)))


@pytest.mark.parametrize(
    ("suffix", "reader"),
    [(".tsv", r"read_csv\(.*t\.tsv', sep='\\t', dtype=str"), (".xlsx", r"read_excel\(.*t\.xlsx'")],
)
def test_a_table_in_another_format_is_refused_with_the_command_that_converts_it(
    tmp_path, suffix, reader
):
    path = write(tmp_path / f"t{suffix}", "prompt\tanswer\n1+1=\t2\n")
    with pytest.raises(
        ValueError, match=f"got '{suffix}' .* Convert it: python -c .*{reader}"
    ) as e:
        read_rows(path)
    if suffix == ".tsv":
        exec(str(e.value).partition('python -c "')[2].removesuffix('"'))
        assert read_rows(str(tmp_path / "t.jsonl"))[0].columns == {"prompt": "1+1=", "answer": "2"}
    with pytest.raises(ValueError, match="no such file"):  # and does not look for it on the Hub
        read_rows(str(tmp_path / f"missing{suffix}"))


def test_a_text_in_place_of_a_row_is_refused_with_what_a_row_is():
    with pytest.raises(ValueError, match=r"no such file .* Rows themselves are dicts, as \{"):
        read_rows("What is 1+1?")


def test_a_source_that_is_neither_a_path_nor_a_dataset_id_is_refused():
    with pytest.raises(ValueError, match="no such file or directory"):
        read_rows("./missing/train")
