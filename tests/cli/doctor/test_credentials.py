"""Where wandb's login is looked for."""

from __future__ import annotations

import pytest

from lit_grpo.cli.doctor.credentials import has_wandb_login

NETRC = "machine {host}\n  login user\n  password {key}\n"
VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_without_a_key_there_is_no_login():
    assert not has_wandb_login()


def test_a_variable_is_a_login(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert has_wandb_login()


@pytest.mark.parametrize(
    ("host", "base_url", "is_login"),
    [
        ("api.wandb.ai", None, True),
        ("example.org", None, False),
        ("wandb.example.org", "https://wandb.example.org", True),
    ],
)
def test_a_netrc_counts_for_its_host(host, base_url, is_login, home, monkeypatch):
    (home / ".netrc").write_text(NETRC.format(host=host, key="x" * 40))
    (home / ".netrc").chmod(0o600)
    if base_url:
        monkeypatch.setenv("WANDB_BASE_URL", base_url)
    assert has_wandb_login() == is_login


def test_a_netrc_that_cannot_be_read_is_no_login(home):
    (home / ".netrc").write_text("machine\n")
    assert not has_wandb_login()
