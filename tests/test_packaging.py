"""Wheels and sdists: complete, and usable away from the checkout.

They are built from a copy of the checkout, in which builds leave files behind, and installed into
environments that see the dependencies of this one but not its link to the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from paths import ROOT
from processes import run_program

pytestmark = pytest.mark.slow

BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
PARTS = [
    "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff",
    "lit_grpo", "callbacks", "configs", "tests",
]  # fmt: skip


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command without the variables that lead to this environment; return its output."""
    hidden = dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"), "")
    return run_program(list(map(str, command)), cwd, **hidden | variables).stdout


def build_wheel(source: Path, directory: Path) -> Path:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    run(sys.executable, "-m", "pip", "wheel", *options, directory, source, cwd=directory.parent)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("checkout")
    for name in PARTS:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy)
    assert (copy / "lit_grpo/configs").is_symlink()
    return copy


@pytest.fixture(scope="module")
def archives(checkout, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("archives")
    run(sys.executable, "-c", BUILD_SDIST, root, cwd=checkout)
    (sdist,) = root.glob("*.tar.gz")
    return {
        "sdist": sdist,
        "wheel": build_wheel(checkout, root / "of_checkout"),
        "wheel of the sdist": build_wheel(sdist, root / "of_sdist"),
    }


def packaged_files(archive: Path) -> dict[str, bytes]:
    """Return path -> content of the files in the package; links are left out."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            found = {name: file.read(name) for name in file.namelist()}
    else:
        with tarfile.open(archive) as tar:
            members = [one for one in tar.getmembers() if one.isreg()]
            found = {one.name.partition("/")[2]: tar.extractfile(one).read() for one in members}
    return {name: data for name, data in found.items() if name.startswith("lit_grpo/")}


@pytest.mark.parametrize("kind", ["sdist", "wheel", "wheel of the sdist"])
def test_an_archive_has_every_file_of_the_package_and_no_other(kind, checkout, archives):
    expected = {
        str(path.relative_to(checkout)): path.read_bytes()
        for folder, _, names in os.walk(checkout / "lit_grpo", followlinks=True)
        for path in (Path(folder, name) for name in names)
    }
    assert packaged_files(archives[kind]) == expected
    suffixes = {Path(name).suffix for name in expected}
    assert suffixes == {".py", ".yaml", ".jinja", ".css", ".js"}
    for name in ("configs/presets/dapo.yaml", "callbacks/timing.py", "judge/templates/grade.jinja"):
        assert f"lit_grpo/{name}" in expected


def test_an_sdist_has_no_part_of_the_tests(archives):
    with tarfile.open(archives["sdist"]) as tar:
        tops = {name.split("/")[1] for name in tar.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"} <= tops
    assert "tests" not in tops


def make_environment(directory: Path) -> Path:
    run(sys.executable, "-m", "venv", "--without-pip", directory, cwd=directory.parent)
    return directory / "bin"


def add_dependencies(programs: Path) -> None:
    """Let an environment import what this one has; its own .pth files are not followed."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    own = Path(run(programs / "python", "-c", code, cwd=programs).strip())
    paths = sysconfig.get_paths()
    (own / "dependencies.pth").write_text(f"{paths['purelib']}\n{paths['platlib']}\n")


def check_installed(programs: Path, elsewhere: Path) -> None:
    elsewhere.mkdir()
    command = programs / "lit-grpo"
    assert run(command, "--version", cwd=elsewhere).startswith("lit-grpo ")
    shown = run(command, "--help", cwd=elsewhere)
    for name in ("debug", "quickstart", "presets/dapo", "engines/vllm"):
        assert f"\n  {name}\n" in shown
    code = (
        "import lit_grpo.callbacks, lit_grpo.judge.template as t"
        "\nimport lit_grpo.runs.report.model_card as card"
        "\nassert card.TEMPLATE.is_file() and len(list(t.SHIPPED.glob('*.jinja'))) > 2"
        "\nprint(lit_grpo.__file__, lit_grpo.callbacks.TimingLog.__module__, flush=True)"
        "\nfrom lit_grpo.__main__ import main"
        "\nmain(['fit', '--config', 'debug', '--print_config'])"
    )
    said, config = run(programs / "python", "-c", code, cwd=elsewhere).split("\n", 1)
    assert yaml.safe_load(config)["data"]["class_path"].endswith("AdditionData")
    place, module = said.split()
    assert Path(place).is_relative_to(programs.parent)
    assert module == "lit_grpo.callbacks.timing"


def check_training(programs: Path, elsewhere: Path) -> None:
    """Train, and draw the run, with the installed command."""
    command = programs / "lit-grpo"
    run(command, "fit", "--config", "debug", "--trainer.max_steps", "2", cwd=elsewhere)
    run_dir = elsewhere / "runs/debug/0"
    assert (run_dir / "final/model.safetensors").is_file()
    assert "Held-out accuracy" in run(command, "report", "runs/debug/0", cwd=elsewhere)
    assert (run_dir / "report.html").is_file()


def test_a_wheel_that_pip_installed_works_away_from_the_checkout(archives, tmp_path):
    programs = make_environment(tmp_path / "environment")
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", archives["wheel"], cwd=tmp_path)
    add_dependencies(programs)
    check_installed(programs, tmp_path / "elsewhere")
    check_training(programs, tmp_path / "elsewhere")


@pytest.fixture
def uv(tmp_path) -> str:
    """A uv that is installed already, or one from the package index."""
    if found := shutil.which("uv"):
        return found
    target = tmp_path / "uv"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", target, "uv"]
    done = subprocess.run(list(map(str, install)), capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"uv cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return str(target / "bin/uv")


def test_an_sdist_that_uv_installed_works_away_from_the_checkout(archives, uv, tmp_path):
    programs = make_environment(tmp_path / "environment")
    variables = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_NO_CONFIG": "1"}
    installed = [uv, "pip", "install", "--quiet", "--offline", "--no-deps"]
    # Without isolation setuptools must be in the environment, and here it is among these.
    add_dependencies(programs)
    options = ["--no-build-isolation", "--reinstall", "--python", programs / "python"]
    run(*installed, *options, archives["sdist"], cwd=tmp_path, **variables)
    check_installed(programs, tmp_path / "elsewhere")


PROGRAM = """
from functools import partial

import pandas as pd
import torch

from lit_grpo import GRPOModule, MathReward, Policy, PromptData, SFTModule, Trainer
from lit_grpo.callbacks import Checkpoints


def length(completions: list[str], **columns: object) -> list[float]:
    return [float(len(one)) for one in completions]


rows = [{"prompt": "1+1=", "answer": 2}]
optimizer = partial(torch.optim.AdamW, lr=1e-5)
module = GRPOModule("path", rewards=[length, MathReward()], optimizer=optimizer)
data = PromptData(rows, validation=pd.DataFrame(rows), prompts_per_step=2)
trainer = Trainer("runs/x", max_steps=1, callbacks=[Checkpoints(every_n_steps=1)])
trainer.fit(module, data, ckpt_path="auto")
SFTModule(Policy("path"))
GRPOModule(3, rewards=[length])  # wrong
"""


def test_a_type_checker_takes_what_the_docs_show_and_no_more(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = subprocess.run(  # there, the types of the package have been read before
        [sys.executable, "-m", "mypy", program], cwd=ROOT, capture_output=True, text=True
    )
    *lines, _ = found.stdout.splitlines()
    assert len(lines) == 1, found.stdout
    assert 'Argument 1 to "GRPOModule" has incompatible type "int"; expected "Policy | ' in lines[0]


def test_the_version_to_cite_is_that_of_the_package():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited == project["version"]
