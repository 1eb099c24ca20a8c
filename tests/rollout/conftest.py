"""The policy that test servers hold, and its directory."""

import pytest
from tiny import tiny_policy


@pytest.fixture(scope="session")
def policy():
    """Not to be changed."""
    return tiny_policy()


@pytest.fixture(scope="session")
def directory(policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    policy.save_pretrained(path)
    return path
