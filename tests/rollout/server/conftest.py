"""Two test servers that the tests here share."""

import tempfile
from pathlib import Path
from uuid import uuid4

import pytest
from served_engines import LONG, LORA, PLAIN, PROMPTS, SEEDED, generate, serving
from sglang_server import running_server


@pytest.fixture(scope="session")
def shared(directory):
    with running_server(directory, **SEEDED, **LORA) as server:
        yield server


@pytest.fixture(scope="session")
def shared_too(directory):
    with running_server(directory, **SEEDED, **LORA) as server:
        yield server


@pytest.fixture(autouse=True)
def traces(tmp_path, monkeypatch):
    """Return what lists the leftovers of engines in the temporary directory and shared memory."""
    name = f"lit-grpo-test-{uuid4().hex}"
    monkeypatch.setenv("NAME_OF_MEMORY", name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: [*tmp_path.glob("lit-grpo-*"), *Path("/dev/shm").glob(f"*{name}*")]


def reset(server, directory):
    server.faults()
    server.post("/abort_request", abort_all=True)
    server.post("/continue_generation")
    weights = {"model_path": str(directory), "weight_version": "default"}
    assert server.post("/update_weights_from_disk", **weights)[0] == 200


@pytest.fixture
def server(shared, directory):
    """A server without faults and with its first weights."""
    reset(shared, directory)
    return shared


@pytest.fixture
def two(server, shared_too, directory):
    reset(shared_too, directory)
    return [server, shared_too]


@pytest.fixture(scope="session")
def undisturbed(policy, shared, directory):
    """The completions of `PROMPTS` without any fault, by sampling parameters."""
    reset(shared, directory)
    with serving(policy, urls=[shared.url]) as engine:
        return {
            sampling: generate(engine, PROMPTS, sampling, group_size=4)
            for sampling in (PLAIN, LONG)
        }
