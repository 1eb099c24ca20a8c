from pathlib import Path

import pytest

from lit_grpo.rollout.server.directory import EngineDirectory, FailureNote


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_temporary_directory_stays_only_if_the_engine_failed(has_failed):
    directory = EngineDirectory(None, is_rank_zero=True)
    directory.weights.mkdir()
    directory.close(has_failed=has_failed)
    assert directory.path.exists() is has_failed
    assert not directory.weights.exists()


def test_a_configured_directory_keeps_all_but_weights_models_and_the_key(tmp_path):
    directory = EngineDirectory(str(tmp_path), is_rank_zero=True)
    for path in (directory.weights, directory.model, directory.api_key):
        path.mkdir()
    Path(tmp_path, "server_0.log").touch()
    directory.close(has_failed=False)
    assert [path.name for path in tmp_path.iterdir()] == ["server_0.log"]


def test_a_failure_is_told_to_other_ranks_and_forgotten_by_the_next_run(tmp_path):
    first = EngineDirectory(str(tmp_path), is_rank_zero=True)
    other = FailureNote(first.path / "failed.txt")
    assert other.read() == ""
    first.failure_note.write("no GPU is left")
    assert other.read() == "no GPU is left"
    assert EngineDirectory(str(tmp_path), is_rank_zero=True).failure_note.read() == ""
