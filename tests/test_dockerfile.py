"""The Dockerfile: linted, without secrets, and in agreement with the package."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from paths import ROOT

DOCKERFILE = ROOT / "Dockerfile"
TEXT = DOCKERFILE.read_text()


def instructions(name: str) -> list[str]:
    """Return the arguments of each instruction of that name, as one line."""
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return re.findall(rf"^{name} +(.+)$", joined, re.MULTILINE)


def test_the_linter_finds_nothing():
    places = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin"
    linter = shutil.which("hadolint", path=places)
    if linter is None:
        pytest.skip("hadolint is not installed; the extra dev has it")
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_installs_extras_that_exist_from_files_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"/src\[(.+)\]"', TEXT)
    assert set(extras.split(",")) == {"vllm", "judge", "wandb"}
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    copied = [name for one in instructions("COPY") for name in shlex.split(one)[:-1]]
    assert {"pyproject.toml", "lit_grpo", "callbacks", "configs"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_it_runs_the_command_as_a_user_other_than_root():
    (user,) = instructions("USER")
    assert user not in ("root", "0")
    assert instructions("ENTRYPOINT") == ['["lit-grpo"]']


def test_it_contains_no_secret():
    settings = [*instructions("ENV"), *instructions("ARG")]
    secret = re.compile("key|token|secret|password|credential", re.IGNORECASE)
    assert settings
    assert not any(secret.search(one) for one in settings)
