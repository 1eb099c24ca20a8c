"""The API key of the servers, which all requests need except health checks and counters.

It is never on a command line, which every user of the machine can read, nor in a config or a log.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_grpo.types import UserError

VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
HIDDEN = "[api key]"

ENGINE = "model.engine.init_args"
"""Where the settings of the servers that sample are in a config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Settings that make a launched server require the key."""

    api_key: str = field(repr=False)
    flags: Mapping[str, Any]
    env: Mapping[str, str] = field(repr=False)
    modules: Path | None = None
    """Directory with modules that it imports."""


def check_variable(name: str | None, key: str = ENGINE) -> None:
    """Check that the setting names an environment variable.

    Args:
        key: Where the setting is in a config, for the error.

    Raises:
        UserError: it does not.
    """
    if name is not None and not VARIABLE.fullmatch(name):
        # The value is not shown: it may be a key.
        raise UserError(
            "api_key_variable must be the name of an environment variable in capitals, such as "
            "VLLM_API_KEY, got something else (a key itself would be saved with the config). "
            f"Export the key and set {key}.api_key_variable to its name."
        )


def choose_key(variable: str | None, *, is_launched: bool, key: str = ENGINE) -> str | None:
    """Return the key in the environment variable, or a random one for servers to launch.

    Args:
        key: Where the setting is in a config, for the error.

    Raises:
        UserError: the variable is not set, or holds something that is not a key.
    """
    if variable is None:
        return secrets.token_hex(32) if is_launched else None
    value = os.environ.get(variable, "")
    if not (value and value.isascii() and value.isprintable() and " " not in value):
        raise UserError(
            f"the environment variable {variable} must hold the API key of the servers, got "
            f"{'nothing' if not value else 'a value with characters that a key cannot have'}. "
            f"Export it, or set {key}.api_key_variable to another name or to null."
        )
    return value


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, in a directory that only this user can enter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
