"""Who may import whom: data flows one way, and plugins stay out of the core."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

MAY_IMPORT = {
    "types": set(),
    "tokenizer": set(),
    "packing": {"types"},
    "packed_attention": {"packing"},
    "scored_answers": set(),
    "data": {"types", "scored_answers"},
    "advantages": {"types"},
    "losses": {"types"},
    "logprobs": {"types", "packing"},
    "body_and_head": {"types", "packed_attention", "packing", "logprobs"},
    "batching": {"types"},
    "metrics": {"types", "losses", "ranks"},
    "stages": {"types"},
    "ranks": {"types"},
    "adapter": set(),
    "backoff": set(),
    "policy": {"types", "adapter", "tokenizer", "packed_attention", "body_and_head"},
    "rollout": {"types", "backoff", "batching", "logprobs", "ranks"},
    "failures": {"types"},
    "symptoms": {"types", "failures"},
    "judge": {"types", "backoff"},
    "rewards": {"types", "backoff", "judge", "scored_answers"},
    "evaluation": {"types", "metrics", "rewards", "rollout"},
    "policy_module": {
        "types", "evaluation", "metrics", "policy", "ranks", "rollout", "stages", "stopping",
    },
    "update": {
        "types", "batching", "logprobs", "losses", "metrics", "policy", "ranks", "rollout",
        "stages",
    },
    "stopping": {"types"},
    "outage": {"types", "failures", "ranks", "rewards", "stages", "stopping"},
    "flights": {"types", "metrics", "module", "policy_module", "rewards", "rollout"},
    "collection": {
        "types", "advantages", "flights", "metrics", "module", "outage", "policy_module", "ranks",
        "rollout", "stages",
    },
    "module": {
        "types", "advantages", "batching", "collection", "evaluation", "losses", "metrics",
        "outage", "policy", "policy_module", "ranks", "rewards", "rollout", "stages", "stopping",
        "body_and_head", "update",
    },
    "sft": {"types", "batching", "evaluation", "logprobs", "policy", "policy_module", "rollout"},
    "run_directory": {"types"},
    "reward_trial": {
        "types", "failures", "module", "policy_module", "rewards", "run_directory", "symptoms",
    },
    "judge_check": {"types", "failures", "judge", "rewards"},
    "reward_changes": {"failures", "rewards"},
    "rescore": {"types", "failures", "reward_changes", "rewards", "run_directory"},
    "curves": set(),
    "report": {"curves"},
    "callbacks": {"types", "stopping", "symptoms"},
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Rooms of lit_grpo that a file imports anywhere, in functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "lit_grpo":
            names |= {f"lit_grpo.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.split(".")[1] for name in names if name.startswith("lit_grpo.")}


def files(room: str) -> list[Path]:
    folder = ROOT / "lit_grpo" / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_stands_before_it(room):
    found = set().union(*map(imports, files(room))) - {room}
    assert found <= MAY_IMPORT[room]


def test_every_room_stands_in_the_table_or_is_the_command_line():
    rooms = {
        path.stem
        for path in (ROOT / "lit_grpo").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    command_line = {room for room in rooms if room.startswith(("cli", "__"))}
    assert rooms - command_line - {"configs"} == MAY_IMPORT.keys()


def test_nobody_imports_the_callbacks():
    for path in (ROOT / "lit_grpo").rglob("*.py"):
        if "callbacks" not in path.parts:
            assert "callbacks" not in imports(path), path


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"torch", "lightning", "transformers", "vllm", "wandb", "openai", "math_verify"}
    assert not heavy & loaded_by("import lit_grpo")


def test_importing_every_room_loads_no_plugins_package():
    statement = "import lit_grpo.training, lit_grpo.data, lit_grpo.callbacks"
    plugins = {"vllm", "wandb", "openai", "diskcache", "azure", "math_verify"}
    assert not plugins & loaded_by(statement)
