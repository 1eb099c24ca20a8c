"""Write paths of a config in another form: ``~`` as the home directory, a run's by ``${run_dir}``.

A shell leaves the ``~`` of ``--run_dir=~/runs`` as it is, and so does YAML.
"""

from __future__ import annotations

from typing import Any

from jsonargparse import Namespace

from lit_grpo.types.paths import at_home

PATHS = {
    *("run_dir", "ckpt_path", "default_root_dir", "dirpath", "save_dir", "dir", "directory"),
    *("path", "tokenizer", "function"),
}
"""Last parts of the keys of paths.

Those of data, judges and their templates keep the ``~``, which their reader expands.
"""


def expand_home(config: Any) -> Any:
    """Return a parsed config, changed in place, with the home directory in its paths."""
    if isinstance(config, list):
        for child in config:
            expand_home(child)
        return config
    children = vars(config) if isinstance(config, Namespace) else config
    for key, value in children.items() if isinstance(children, dict) else ():
        if not isinstance(value, str):
            expand_home(value)
        elif key in PATHS:
            children[key] = at_home(value)
    return config


def follow_run_dir(node: Any, run_dir: str) -> Any:
    """Return a part of a config with the paths in the run directory as ``${run_dir}/…``."""
    if isinstance(node, str) and node.startswith(f"{run_dir}/"):
        return "${run_dir}" + node.removeprefix(run_dir)
    if isinstance(node, Namespace):
        followed = {key: follow_run_dir(child, run_dir) for key, child in vars(node).items()}
        return Namespace(followed)  # type: ignore[no-untyped-call]
    if isinstance(node, dict):
        return {key: follow_run_dir(child, run_dir) for key, child in node.items()}
    return [follow_run_dir(one, run_dir) for one in node] if isinstance(node, list) else node
