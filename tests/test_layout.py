"""Imports go one way, packages have few entries, and tests have the paths of their modules."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT, TESTS

PACKAGE = ROOT / "lit_grpo"

MAY_IMPORT = {
    "types": set(),
    "concurrency": set(),
    "stopping": {"types"},
    "data": {"types"},
    "objective": {"types"},
    "policy": {"types"},
    "distributed": {"types", "policy"},
    "judge": {"types", "concurrency", "distributed"},
    "diagnostics": {"types", "stopping", "objective"},
    "rewards": {"types", "concurrency", "distributed", "data", "judge"},
    "rollout": {"types", "concurrency", "distributed", "policy"},
    "training": {
        "types", "concurrency", "stopping", "data", "objective", "policy", "distributed",
        "diagnostics", "rewards", "rollout",
    },
    "runs": {"types", "concurrency", "stopping", "policy", "distributed", "diagnostics"},
    "cli": {
        "types", "concurrency", "stopping", "data", "objective", "policy", "distributed", "judge",
        "diagnostics", "rewards", "rollout", "training", "runs",
    },
    "callbacks": {"types", "stopping", "diagnostics", "rewards", "runs"},
    "configs": set(),
}  # fmt: skip
"""By package, from the bottom to the top: a package may import only what stands above it here."""

MAX_ENTRIES = {
    "": 18,
    "data": 12,
    "rollout": 12,
    "rewards": 12,
    "training": 20,
    "runs": 19,
    "cli": 24,
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# The folder of callbacks is a link, which `rglob` does not follow.
FILES = {
    module_name(path): path
    for path in sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "callbacks").glob("*.py")})
    if "configs" not in path.relative_to(PACKAGE).parts
}


def homes() -> dict[str, str]:
    """Module that defines a name which an ``__init__`` collects: ``lit_grpo.types.Prompt``."""
    collected = {
        f"{module}.{alias.asname or alias.name}": f"{node.module}.{alias.name}"
        for module, path in FILES.items()
        if path.name == "__init__.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    while any(name in collected for name in collected.values()):
        collected = {name: collected.get(home, home) for name, home in collected.items()}
    return {name: home.rpartition(".")[0] for name, home in collected.items()}


HOMES = homes()


def imports(path: Path) -> set[str]:
    """Modules of lit_grpo that a file imports, in functions and for type checkers as well.

    A name that an ``__init__`` collects is imported from where it is defined.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else HOMES.get(name, node.module) for name in members}
        else:
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"relative: {path}"
    return {name for name in found if name.split(".")[0] == "lit_grpo"}


def package(module: str) -> str:
    """``training`` of ``lit_grpo.training.grpo``; empty for ``lit_grpo`` itself."""
    return (module.split(".") + [""])[1]


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_package_imports_only_what_it_may(name):
    own = [path for module, path in FILES.items() if package(module) == name]
    assert own or name == "configs"
    found = {package(module) for path in own for module in imports(path)}
    assert found - {name, ""} <= MAY_IMPORT[name]


def test_every_package_is_in_the_table():
    assert {package(module) for module in FILES} - {"", "__main__"} <= MAY_IMPORT.keys()


def test_packages_import_in_one_direction():
    order = list(MAY_IMPORT)
    for name, allowed in MAY_IMPORT.items():
        assert all(order.index(one) < order.index(name) for one in allowed), name


def test_no_files_import_each_other_in_a_circle():
    graph = {
        module: imports(path)
        for module, path in FILES.items()
        if path.name != "__init__.py"  # it only collects names
    }
    for imported in graph.values():
        imported.intersection_update(graph)
    while leaves := [module for module, imported in graph.items() if not imported]:
        for leaf in leaves:
            del graph[leaf]
        for imported in graph.values():
            imported.difference_update(leaves)
    assert not graph


def folder(module: str) -> tuple[str, ...]:
    """The folders below the package of a module: ``("cli", "prepare")``."""
    return tuple(module.split(".")[1:-1])


def test_no_two_folders_of_a_package_import_each_other():
    pairs = {
        (folder(module), folder(one))
        for module, path in FILES.items()
        for one in imports(path)
        if one in FILES and len(folder(module)) == len(folder(one)) > 1
    }
    assert [(one, other) for one, other in pairs if one < other and (other, one) in pairs] == []


def test_packages_export_what_the_documentation_names():
    pages = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "log.md"}
    code = (re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL) for page in pages)
    known = {word for parts in code for part in parts for word in re.findall(r"\w+", part)}
    exporting = [name for name, path in FILES.items() if path.name == "__init__.py"]
    assert len(exporting) > 10
    for name in exporting:
        exported = getattr(importlib.import_module(name), "__all__", [])
        assert not {*exported} - known, name


def test_no_other_package_imports_the_callbacks():
    others = {module: path for module, path in FILES.items() if package(module) != "callbacks"}
    for module, path in others.items():
        assert not any(package(one) == "callbacks" for one in imports(path)), module


@pytest.mark.parametrize(("folder", "limit"), MAX_ENTRIES.items())
def test_a_package_has_few_entries(folder, limit):
    entries = {path.name for path in (PACKAGE / folder).iterdir()} - {"__pycache__"}
    assert len(entries) <= limit, sorted(entries)


def list_test_files() -> list[Path]:
    plain = ("end_to_end", "support", "scripts")
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    return [path for path in files if len(path.parts) > 1 and path.parts[0] not in plain]


WITHOUT_LOGIC = {
    *(f"diagnostics/causes/{name}.py" for name in ("ends", "machine", "policy", "rewards")),
    *("diagnostics/causes/rollouts.py", "objective/inputs.py"),
}
"""Tables of words, which tests/diagnostics/causes/test_table.py checks, and types."""
MODULES = {path.relative_to(PACKAGE) for path in FILES.values() if path.stem != "__init__"}
BY_NAME = {path.with_name(path.stem.strip("_")): path for path in MODULES}


def subject_of(test: Path) -> Path | None:
    """Return the module of a test file: with ``a`` and ``a_b``, ``test_a_b_c`` tests ``a_b``."""
    words = test.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:number]) for number in range(len(words), 0, -1)]
    return next((BY_NAME[one] for name in names if (one := test.with_name(name)) in BY_NAME), None)


@pytest.mark.parametrize("path", list_test_files(), ids=str)
def test_a_test_file_has_the_path_of_its_module(path):
    assert subject_of(path) is not None


def has_fast_test(path: Path) -> bool:
    """Return whether `./scripts/test` runs a test of this file."""
    body = ast.parse(path.read_text()).body
    marks = [ast.unparse(node) for node in body if isinstance(node, ast.Assign)]
    if any(one.startswith("pytestmark") and "mark.slow" in one for one in marks):
        return False
    tests = [one for one in body if isinstance(one, ast.FunctionDef) and one.name[:5] == "test_"]
    return any("pytest.mark.slow" not in map(ast.unparse, one.decorator_list) for one in tests)


TESTED = {
    subject_of(one.relative_to(TESTS)) for one in TESTS.rglob("test_*.py") if has_fast_test(one)
}


@pytest.mark.parametrize("path", sorted(MODULES - set(map(Path, WITHOUT_LOGIC))), ids=str)
def test_a_module_has_a_fast_test_in_a_file_that_is_not_the_one_of_another(path):
    assert path in TESTED


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules that are loaded after each of some imports, in one process."""
    packages = ("", ".stopping", ".rewards", ".data", ".training", ".callbacks")
    names = [f"lit_grpo{name}" for name in packages]
    code = "import sys\n" + "".join(
        f"import {name}\nprint({name!r}, *sys.modules)\n" for name in names
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in result.stdout.splitlines()]
    return {name: set(modules) for name, *modules in lines}


@pytest.mark.slow
def test_importing_the_package_loads_nothing_heavy(loaded):
    heavy = {"torch", "lightning", "transformers", "vllm", "wandb", "openai", "math_verify"}
    assert not heavy & loaded["lit_grpo"]


@pytest.mark.slow
def test_exit_codes_are_known_without_heavy_imports(loaded):
    assert not {"torch", "lightning"} & loaded["lit_grpo.stopping"]


@pytest.mark.slow
def test_rewards_load_nothing_slow_into_worker_processes(loaded):
    assert "torch" in loaded["lit_grpo.rewards"]
    slow = {"lightning", "transformers", "math_verify", "sympy", "openai", "diskcache"}
    assert not slow & loaded["lit_grpo.rewards"]


@pytest.mark.slow
def test_importing_every_package_loads_no_package_of_a_plugin(loaded):
    assert "lightning" in loaded["lit_grpo.callbacks"]
    plugins = {"vllm", "wandb", "openai", "diskcache", "azure", "math_verify", "deepspeed"}
    assert not plugins & loaded["lit_grpo.callbacks"]
