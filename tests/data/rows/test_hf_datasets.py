"""Directories and ids of the Hub are read as datasets."""

import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
from processes import run_program

from lit_grpo.data.rows.sources import read_rows
from lit_grpo.types import UserError

ROW = {"text": 'é, "q"\nline', "tags": ["a", "b"], "meta": {"scores": [0.5, None], "n": 3}}


@pytest.fixture(autouse=True)
def dataset_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, content: str) -> str:
    path.write_bytes(content.encode())
    return str(path)


def test_a_dataset_saved_to_disk_is_read_with_nested_columns(tmp_path):
    datasets.Dataset.from_list([ROW, ROW]).save_to_disk(tmp_path / "saved")
    rows = read_rows(str(tmp_path / "saved"))
    assert [row.columns for row in rows] == [ROW, ROW]
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
        return datasets.Dataset.from_list([ROW])

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
    code = "from lit_grpo.data.rows.sources import read_rows; read_rows('some-org/sums:main:train')"
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
    try:
        child = run_program([sys.executable, "-c", code], exit_code=1, HF_HOME=str(tmp_path), **hub)
    finally:
        server.shutdown()
    assert any("/some-org/sums" in path for path in EmptyHub.requests)
    assert "UserError: some-org/sums:main:train: no dataset could be loaded" in child.stderr
    assert "id:subset:split" in child.stderr.splitlines()[-1]
