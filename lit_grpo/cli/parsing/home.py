"""Expand ``~`` in the paths of a config, which a shell leaves as it is in ``--run_dir=~/runs``."""

from __future__ import annotations

import os
from typing import Any

from jsonargparse import Namespace

PATHS = {
    *("run_dir", "ckpt_path", "default_root_dir", "dirpath", "save_dir", "directory"),
    *("path", "tokenizer", "function"),
}
"""Last parts of the keys of paths. Those of data keep the ``~``, which their reader expands."""


def expand_home(config: Any) -> Any:
    """Return a parsed config, changed in place, with the home directory in its paths."""
    if isinstance(config, list):
        for child in config:
            expand_home(child)
        return config
    children = vars(config) if isinstance(config, Namespace) else config
    for key, value in children.items() if isinstance(children, dict) else ():
        if isinstance(value, str):
            if key in PATHS and value.startswith("~"):
                children[key] = os.path.expanduser(value)
        else:
            expand_home(value)
    return config
