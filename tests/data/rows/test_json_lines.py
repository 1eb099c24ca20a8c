"""A line of a jsonl file that is no row is named with its number and what is wrong with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lit_grpo.data.rows.sources import read_rows
from lit_grpo.types import UserError


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_a_broken_jsonl_line_is_named_with_the_character(tmp_path):
    path = write(tmp_path / "t.jsonl", '{"a": 1}\n{"a": x}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl, row 2 is not JSON: .* at character 7 of .*"):
        read_rows(path)


def test_a_jsonl_line_that_is_not_an_object_is_named(tmp_path):
    path = write(tmp_path / "t.jsonl", '{"a": 1}\n[1, 2]\n')
    with pytest.raises(ValueError, match=r"t\.jsonl, row 2 is not a JSON object but a list"):
        read_rows(path)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("[" * 5000, "nested more than 200 deep"),
        ("[" * 300 + "]" * 300, "nested more than 200 deep"),
        ('{"a":' * 300 + "1" + "}" * 300, "nested more than 200 deep"),
        ("1" * 5000, "has an integer of more than 4300 digits"),
    ],
)
def test_what_python_cannot_hold_is_named_with_its_row(tmp_path, value, reason):
    path = write(tmp_path / "t.jsonl", f'{{"a": 1}}\n{{"a": {value}}}\n')
    with pytest.raises(UserError, match=rf"t\.jsonl, row 2 cannot be read: it.*{reason}\. Each"):
        read_rows(path)


def test_rows_that_end_in_cr_alone_are_told_their_line_ends(tmp_path):
    path = write(tmp_path / "t.jsonl", '{"a": 1}\r{"a": 2}\r')
    with pytest.raises(UserError, match="several rows: the lines of the file end in CR alone"):
        read_rows(path)
    assert len(read_rows(write(tmp_path / "u.jsonl", '{"a": 1}\r\n{"a": 2}\r\n'))) == 2


def test_many_lists_beside_each_other_are_not_nested(tmp_path):
    path = write(tmp_path / "t.jsonl", json.dumps({"a": [[1]] * 500, "b": "[" * 500}))
    assert len(read_rows(path)[0].columns["a"]) == 500


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_a_whole_array_is_named_with_a_command_that_converts_it(tmp_path, indent):
    rows = [{"a": "é"}, {"a": 2}]
    content = json.dumps(rows, indent=indent, ensure_ascii=False)
    path = write(tmp_path / "t.jsonl", content)
    with pytest.raises(ValueError, match=r"t\.jsonl is one JSON array, not one JSON ") as raised:
        read_rows(path)
    command = str(raised.value).partition("Convert it: ")[2]
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True)
    assert [row.columns for row in read_rows(str(tmp_path / "t_lines.jsonl"))] == rows


def test_lines_that_are_lists_of_objects_are_no_array(tmp_path):
    path = write(tmp_path / "t.jsonl", '[{"a": 1}]\n[{"a": 2}]\n')
    with pytest.raises(ValueError, match=r"t\.jsonl, row 1 is not a JSON object but a list"):
        read_rows(path)


def test_a_text_that_does_not_end_is_named_with_the_character_at_which_it_starts(tmp_path):
    path = write(tmp_path / "t.jsonl", '{"a": "x')
    with pytest.raises(ValueError, match=r"Unterminated string starting at character 7 of "):
        read_rows(path)


@pytest.mark.parametrize(("line", "kind"), [("5", "a number"), ("null", "null"), ('"a"', "text")])
def test_what_a_jsonl_line_holds_is_named_in_words(tmp_path, line, kind):
    with pytest.raises(ValueError, match=rf"row 1 is not a JSON object but {kind}\. "):
        read_rows(write(tmp_path / "t.jsonl", f"{line}\n"))


@pytest.mark.parametrize("line", ['{"a": 1, "b": 2, "a": 3}', '{"b": [{"a": 1, "a": 1}]}'])
def test_a_key_that_a_jsonl_row_has_twice_is_named(tmp_path, line):
    path = write(tmp_path / "t.jsonl", '{"a": 1}\n' + line)
    with pytest.raises(ValueError, match=r"t\.jsonl, row 2 has the key 'a' more than once"):
        read_rows(path)


def test_a_jsonl_line_in_another_encoding_is_named(tmp_path):
    path = write(tmp_path / "t.jsonl", b'{"a": 1}\n{"a": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl, row 2 is not UTF-8"):
        read_rows(path)


def test_a_jsonl_line_with_half_a_character_is_named_and_a_whole_pair_is_read(tmp_path):
    path = write(tmp_path / "t.jsonl", r'{"a": "\ud83d\ude00"}' "\n" r'{"a": ["\ud83d"]}' "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, row 2 has a \\u escape of half a character"):
        read_rows(path)
    path = write(tmp_path / "t.jsonl", r'{"a": "\ud83d\ude00"}' "\n")
    assert read_rows(path)[0].columns == {"a": "\N{GRINNING FACE}"}
