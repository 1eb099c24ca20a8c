"""Files and datasets become rows that know their origin, or an error that names it."""

import csv
import gzip
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import run_program

from lit_grpo.data import read_rows
from lit_grpo.types import UserError

NESTED = {"text": 'é, "q"\nline', "tags": ["a", "b"], "meta": {"scores": [0.5, None], "n": 3}}


@pytest.fixture(autouse=True)
def dataset_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


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
    with pytest.raises(ValueError, match=r"must end in \.jsonl, \.parquet, \.csv, got '\.json'"):
        read_rows(write(tmp_path / "t.json", "[]"))


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


def test_a_source_that_is_neither_a_path_nor_a_dataset_id_is_refused():
    with pytest.raises(ValueError, match="no such file or directory"):
        read_rows("./missing/train")


def test_a_dataset_saved_to_disk_is_read_with_nested_columns(tmp_path):
    datasets.Dataset.from_list([NESTED, NESTED]).save_to_disk(tmp_path / "saved")
    rows = read_rows(str(tmp_path / "saved"))
    assert [row.columns for row in rows] == [NESTED, NESTED]
    assert [row.id for row in rows] == ["saved:1", "saved:2"]


def test_the_split_of_a_saved_dataset_is_chosen_by_name(tmp_path):
    splits = {name: datasets.Dataset.from_list([{"a": name}]) for name in ("train", "test")}
    path = str(tmp_path / "saved")
    datasets.DatasetDict(splits).save_to_disk(path)
    assert read_rows(f"{path}:test")[0].columns == {"a": "test"}
    with pytest.raises(ValueError, match=r"must name one of its splits train, test .*saved:train"):
        read_rows(path)
    with pytest.raises(ValueError, match=r"no split 'tset', only train, test\. Write .*saved:tr"):
        read_rows(f"{path}:tset")


def test_a_directory_of_data_files_is_read_as_a_dataset(tmp_path):
    directory = tmp_path / "mine"
    directory.mkdir()
    write(directory / "train.jsonl", '{"q": "x", "n": 1}\n{"q": "y", "n": 2}\n')
    write(directory / "test.jsonl", '{"q": "z", "n": 3}\n')
    rows = read_rows(f"{directory}:train")
    assert [row.columns for row in rows] == [{"q": "x", "n": 1}, {"q": "y", "n": 2}]
    assert rows[1].id == "mine-train:2"
    assert [row.columns["q"] for row in read_rows(f"{directory}:default:train[1:]")] == ["y"]


@pytest.mark.parametrize(
    ("names", "suffix", "error"),
    [
        (("zoo.jsonl", "zoo_val.jsonl"), "", r"only the split validation .*Write .*mine:valid.*or"),
        (("zoo.jsonl", "train.jsonl"), "", r"only the split train .*leaves out zoo\.jsonl\. Write"),
        (("zoo.jsonl", "more.csv"), "", r"several formats \(\.csv, \.jsonl\), of which only one"),
        (("train.jsonl", "more.csv"), ":train", "several formats"),
    ],
)
def test_a_directory_of_which_files_would_be_left_out_is_refused(names, suffix, error, tmp_path):
    (tmp_path / "mine").mkdir()
    for name in names:
        write(tmp_path / "mine" / name, '{"q": "x"}\n' if "jsonl" in name else "q\nx\n")
    with pytest.raises(UserError, match=error):
        read_rows(f"{tmp_path}/mine{suffix}")


def test_a_mistyped_file_is_no_dataset_on_the_hub(tmp_path, monkeypatch):
    write(tmp_path / "rows.parquet", "")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such file .*Did you mean rows.parquet\?$"):
        read_rows("rows.parqet")


@pytest.mark.parametrize("others", [(), (".cache/more.csv", ".cache/more.jsonl")])
def test_a_directory_of_one_split_of_which_all_files_are_read_needs_no_split(others, tmp_path):
    (tmp_path / "mine/.cache").mkdir(parents=True)
    for name in ("zoo_val.jsonl", "more_val.jsonl", *others):
        write(tmp_path / "mine" / name, '{"q": "x"}\n')
    assert len(read_rows(f"{tmp_path}/mine")) == 2


def test_the_working_directory_is_a_dataset_with_the_name_of_the_directory(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine" / "train.jsonl", '{"q": "x"}\n')
    monkeypatch.chdir(tmp_path / "mine")
    assert [row.id for row in read_rows(".")] == ["mine-train:1"]


def test_a_dataset_id_is_loaded_with_its_subset_and_split_and_its_error_is_shown(monkeypatch):
    calls = []

    def load_dataset(path, subset, split, streaming):
        assert not streaming
        calls.append((path, subset, split))
        if split == "missing":
            raise ValueError("no such split")
        return datasets.Dataset.from_list([NESTED])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = [*read_rows("org/sums"), *read_rows("org/sums:train[:10]")]
    assert [row.id for row in rows] == ["sums:1", "sums:1"]
    with pytest.raises(ValueError, match=r"no dataset could be loaded \(ValueError: no such split"):
        read_rows("org/sums:main:missing")
    assert calls == [
        ("org/sums", None, None),
        ("org/sums", None, "train[:10]"),
        ("org/sums", "main", "missing"),
    ]


class EmptyHub(BaseHTTPRequestHandler):
    """A Hub without datasets that records the requests for them."""

    requests: list[str] = []

    def do_GET(self):
        self.requests.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_a_dataset_id_is_requested_from_the_hub_and_an_unknown_one_is_refused_by_name(
    tmp_path, monkeypatch
):
    for name in [name for name in os.environ if "PROXY" in name.upper()]:
        monkeypatch.delenv(name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), EmptyHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = "from lit_grpo.data import read_rows; read_rows('some-org/sums:main:train')"
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
    try:
        child = run_program([sys.executable, "-c", code], exit_code=1, HF_HOME=str(tmp_path), **hub)
    finally:
        server.shutdown()
    assert any("/some-org/sums" in path for path in EmptyHub.requests)
    assert "UserError: some-org/sums:main:train: no dataset could be loaded" in child.stderr
    assert "id:subset:split" in child.stderr.splitlines()[-1]
