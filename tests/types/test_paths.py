import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from forked import run_in_processes

from lit_grpo import Policy
from lit_grpo.callbacks import Checkpoints
from lit_grpo.policy import LocalTeacher
from lit_grpo.rewards import ScorerReward
from lit_grpo.types import UserError
from lit_grpo.types.paths import at_home, check_run_dir, refuse_unreadable, shown_path


@pytest.fixture(autouse=True)
def home(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("~/runs/a", "/home/me/runs/a"),
        (Path("~/runs/a"), "/home/me/runs/a"),
        ("~", "~"),
        ("~nobody-of-this-name/a", "~nobody-of-this-name/a"),
        ("runs/~/a", "runs/~/a"),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
    ],
)
def test_a_tilde_at_the_start_is_the_home_directory(given, read):
    assert at_home(given) == read


def test_python_s_classes_read_it_as_a_config_does():
    policy = Policy("~/model", tokenizer="~/tokenizer")
    assert (policy.path, policy.tokenizer_path) == ("/home/me/model", "/home/me/tokenizer")
    assert LocalTeacher("~/model").path == "/home/me/model"
    assert ScorerReward("~/model").settings.path == "/home/me/model"
    assert Checkpoints(dirpath="~/saved").dirpath == "/home/me/saved"


def test_a_path_is_shown_below_the_working_directory_or_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "runs" / "a") == "runs/a"
    assert shown_path(tmp_path.parent / "a") == str(tmp_path.parent / "a")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert shown_path(tmp_path / "a") == str(tmp_path / "a")


def as_another_user(function):
    """Return what a function returns for a user who owns nothing."""

    def run():
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            return function() or "passes"
        except UserError as error:
            return str(error)

    return run_in_processes(run)[0]


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user may read, unlike those of ``tmp_path``."""
    with TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_what_the_user_may_not_read_is_refused_as_such(public):
    closed, file = public / "closed", public / "file"
    closed.mkdir()
    (closed / "inner").touch()
    file.touch()
    for path in (closed, file):
        assert as_another_user(lambda path=path: refuse_unreadable(path)) == "passes"
        path.chmod(0)
    for path in (closed, closed / "inner", file):
        said = as_another_user(lambda path=path: refuse_unreadable(path))
        assert said.startswith(f"{path} may not be read by this user (permission denied). Ask its")
    assert as_another_user(lambda: refuse_unreadable(public / "absent")) == "passes"
    closed.chmod(0o700)


def test_an_empty_text_is_no_directory_of_a_run():
    check_run_dir("runs")
    check_run_dir(None)
    with pytest.raises(UserError, match="run_dir must be a directory, got an empty string"):
        check_run_dir("")
