"""``config.yaml``: written when training begins, and kept when it is replaced."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_grpo.runs.files.config import ConfigFile, is_of_another_run, similar_run


def begin(run_dir, config, *, rank=0):
    ConfigFile(run_dir, config).on_train_start(SimpleNamespace(is_global_zero=rank == 0), None)


def test_each_different_config_of_a_run_is_kept(tmp_path):
    for config in ("a: 1", "a: 1", "a: 2", "a: 3"):
        begin(tmp_path, config)
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert files == {"config.0.yaml": "a: 1", "config.1.yaml": "a: 2", "config.yaml": "a: 3"}


def test_only_the_first_rank_writes(tmp_path):
    begin(tmp_path, "a: 1", rank=1)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("runs/words/0", " Did you mean runs/words-slow/0?"),
        ("run/words-slow", " Did you mean runs/words-slow?"),
        ("runs/words-slaw/0", " Did you mean runs/words-slow/0?"),
        ("runs/words-slow/2", ""),  # what is missing is short, and nothing is like it
        ("runs/other/1", ""),
        ("runs/plotz", ""),  # no run is in plots
        ("run/words-slow/0", ""),
        ("runs/words-slow/0", ""),
    ],
)
def test_a_run_of_a_similar_path_is_suggested(path, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for directory in ("runs/words-slow/0", "runs/plots/0", "runs/.cache/0"):
        Path(directory).mkdir(parents=True)
    Path("runs/words-slow/0/config.yaml").touch()
    Path("runs/.cache/0/config.yaml").touch()
    assert similar_run(Path(path)) == expected
    absolute = f" Did you mean {tmp_path}/{expected[14:]}" if expected else ""
    assert similar_run(tmp_path / path) == absolute


def test_a_checkpoint_is_another_runs_only_in_the_directory_of_one(tmp_path):
    own, other, within = tmp_path / "own", tmp_path / "other", tmp_path / "own" / "within"
    for run in (own, other, within):
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").touch()
    link = tmp_path / "link"
    link.symlink_to(own)
    for directory in (own / "checkpoints", link / "checkpoints", tmp_path / "disk/saved"):
        assert not is_of_another_run(directory / "last.ckpt", own)
    for run in (other, within):
        assert is_of_another_run(run / "checkpoints/last.ckpt", own)
