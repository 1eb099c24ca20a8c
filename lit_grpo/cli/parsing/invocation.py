"""Read a command line and the config files that it names, before the real parser exists.

The keys of the parser depend on what the files say about the model, and its defaults on the run
directory. Keys are not checked, and interpolations are not resolved here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from lit_grpo.cli.commands import BUNDLED
from lit_grpo.cli.parsing.config_checks import refuse_secrets
from lit_grpo.cli.parsing.config_files import find_config, read_config
from lit_grpo.cli.parsing.merging import combined_arguments
from lit_grpo.runs.files.config import argument as value_at
from lit_grpo.types import UserError
from lit_grpo.types.paths import at_home, check_run_dir

NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|-inf", re.IGNORECASE)
"""Argparse takes one with an exponent for an option, unless a = stands before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A command line and what its config files say."""

    arguments: tuple[str, ...]
    """Config files as paths first, so that all other arguments override them.

    A run directory with ``~`` follows without it, for other keys that contain it.
    """
    directories: tuple[str, ...]
    """Directories of the user's config files, where their code is also looked for."""
    configs: tuple[dict[str, Any], ...]
    """Contents of the config files, in their order."""
    name: str
    """The names of the config files joined, such as ``quickstart-dapo``; empty without files."""
    run_dir: str | None
    ckpt_path: str | None
    has_model_class: bool
    """Whether ``model`` is given by ``class_path``, not by the keys of the built-in class."""
    has_rewards: bool
    """Whether ``model`` has rewards, which only GRPO has."""
    seeded: frozenset[str]
    """``model`` and ``data``, where a seed of theirs is set."""
    is_sft: bool
    """Whether ``model`` has ``target_column``, which only `SFTModule` takes."""


def read_invocation(arguments: Sequence[str]) -> Invocation:
    """Find and read the config files among the arguments.

    Raises:
        UserError: a file does not exist or is not a YAML mapping, a secret is interpolated, or
            arguments of a class are next to its path.
    """
    parser = _PartialParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    named, others = parser.parse_known_args(_with_negative_numbers(arguments))
    refuse_secrets(others, "the command line")
    paths = [find_config(name) for name in named.config]
    _check_presets([path.stem for path in paths if path.parent == BUNDLED / "presets"])
    configs = [read_config(path) for path in paths]
    given = last_value("run_dir", configs, others)
    check_run_dir(given)
    run_dir = at_home(given) if isinstance(given, str) else given
    others += [f"--run_dir={run_dir}"] if run_dir != given else []
    others += _without_architecture(configs, others)
    return Invocation(
        arguments=combined_arguments(list(zip(paths, configs, strict=True)), others),
        directories=tuple(
            str(path.parent.absolute()) for path in paths if not path.is_relative_to(BUNDLED)
        ),
        configs=tuple(configs),
        name="-".join(path.stem for path in paths),
        run_dir=run_dir,
        ckpt_path=last_value("ckpt_path", configs, others),
        has_model_class=any(_names_class(config.get("model")) for config in configs)
        or any(re.match(r"--model(\.class_path)?(=|$)", argument) for argument in others),
        has_rewards=any(_has_key(config.get("model"), "rewards") for config in configs),
        seeded=frozenset(
            section for section in ("model", "data") if _sets_seed(section, configs, others)
        ),
        is_sft=any(_has_key(config.get("model"), "target_column") for config in configs),
    )


def _sets_seed(
    section: str, configs: Sequence[Mapping[str, Any]], arguments: Sequence[str]
) -> bool:
    """Return whether a file or an argument sets the seed of a section."""
    option = re.compile(rf"--{section}\.(init_args\.)?seed(=|$)")
    is_in_file = any(value_at(config, section, "seed") is not None for config in configs)
    return is_in_file or any(map(option.match, arguments))


def _without_architecture(
    configs: Sequence[Mapping[str, Any]], arguments: Sequence[str]
) -> list[str]:
    """Return the argument that removes a file's architecture, for a path on the command line.

    Return nothing unless there is one of each, and the command line does not set the architecture.
    """
    key = "--model.policy.architecture"
    has_path = last_value("model.policy.path", [], arguments) not in (None, "null")
    is_built = any(value_at(config, "model", "policy", "architecture") for config in configs)
    is_given = any(re.match(rf"{key}\b", one) for one in arguments)
    return [f"{key}=null"] if has_path and is_built and not is_given else []


def _with_negative_numbers(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with each negative number joined to the key before it."""
    joined: list[str] = []
    for argument in arguments:
        if NEGATIVE_NUMBER.fullmatch(argument) and joined and re.fullmatch(r"--[^=]+", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _check_presets(names: Sequence[str]) -> None:
    if len(names) > 1:
        raise UserError(
            f"--config must name at most one preset, got {' and '.join(names)} (settings of one "
            "that the other does not have would stay, which mixes two methods). Remove all "
            "but one, or set the keys that you want to change."
        )


def last_value(
    key: str, configs: Sequence[Mapping[str, Any]], arguments: Sequence[str]
) -> str | None:
    """Return the value of a key: from the command line, else from the last file that has it."""
    parser = _PartialParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{key}")
    values = [config.get(key) for config in configs]
    values.append(vars(parser.parse_known_args(arguments)[0])[key])
    return next((value for value in reversed(values) if value is not None), None)


def _names_class(model: Any) -> bool:
    return isinstance(model, str) or (isinstance(model, dict) and "class_path" in model)


def _has_key(model: Any, key: str) -> bool:
    return isinstance(model, dict) and key in model


class _PartialParser(argparse.ArgumentParser):
    """A parser of a few arguments that raises instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))
