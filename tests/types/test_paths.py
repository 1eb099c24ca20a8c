from pathlib import Path

import pytest

from lit_grpo import Policy
from lit_grpo.callbacks import Checkpoints
from lit_grpo.policy import LocalTeacher
from lit_grpo.rewards import ScorerReward
from lit_grpo.types.paths import at_home


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
