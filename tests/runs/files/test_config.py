"""``config.yaml``: written when training begins, and kept when it is replaced."""

from types import SimpleNamespace

from lit_grpo.runs.files.config import ConfigFile


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
