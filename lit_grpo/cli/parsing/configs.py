"""Find and read the config files that a command line names, before the real parser exists.

The keys of the parser depend on what the files say about the model, and its defaults on the run
directory. Keys are not checked, and interpolations are not resolved here.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lit_grpo.cli.commands import BUNDLED, bundled_configs
from lit_grpo.cli.parsing.config_checks import (
    refuse_empty,
    refuse_misplaced,
    refuse_odd_indents,
    refuse_odd_spaces,
    refuse_other_bases,
    refuse_paths_as_sources,
    refuse_repeated_keys,
    refuse_secrets,
)
from lit_grpo.cli.parsing.object_checks import refuse_beside, refuse_other_forms
from lit_grpo.runs.files.config import argument as value_at
from lit_grpo.types import UserError
from lit_grpo.types.paths import at_home, refuse_no_directory
from lit_grpo.types.settings import list_some
from lit_grpo.types.spelling import did_you_mean

NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|-inf", re.IGNORECASE)
"""Argparse takes one with an exponent for an option, unless a = stands before it."""

FREE_FORM = ("architecture", "chat_template_kwargs", "columns", "env", "flags", "where")
"""Keys of mappings with names of the user's or of another library: the parser replaces these."""

REWARDS = "model.rewards"
"""The key of a list of objects that may also be written as paths of functions."""


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
    refuse_no_directory(given)
    run_dir = at_home(given) if isinstance(given, str) else given
    others += [f"--run_dir={run_dir}"] if run_dir != given else []
    others += _without_architecture(configs, others)
    return Invocation(
        arguments=_replacing_lists(list(zip(paths, configs, strict=True)), others),
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

    Nothing unless there is one of each, and the command line says nothing of the architecture.
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


def _replacing_lists(
    configs: Sequence[tuple[Path, dict[str, Any]]], others: Sequence[str]
) -> tuple[str, ...]:
    """Return the arguments, with each list emptied before another list replaces it.

    Otherwise the parser would merge the objects of two lists of the same length one by one.
    """
    arguments: list[str] = []
    with_objects: set[str] = set()
    mappings: dict[str, dict[str, Any]] = {}

    def add(value: Any, argument: str) -> None:
        for key, items in lists_in(value):
            if key in with_objects:
                arguments.append(f"--{key}=[]")
            if key.removesuffix("+") == REWARDS or any(map(_is_object, items)):
                with_objects.add(key.removesuffix("+"))
        arguments.append(argument)

    for path, config in configs:
        add(config, f"--config={path}")
        arguments += _merging(config, mappings)
    for argument, following in zip(others, [*others, ""][1:], strict=True):
        key, has_value, value = argument.removeprefix("--").partition("=")
        given = {key: value_of(value if has_value else following)}
        refuse_other_forms(given, "the command line")
        refuse_beside(given, "", "the command line")
        add(given, argument)
    return tuple(arguments)


def _merging(config: Mapping[str, Any], earlier: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the arguments that merge a file's mappings with those of the files before it.

    Args:
        earlier: Key without ``init_args`` -> what the files so far say; the file's is added.
    """
    for key, value in _free_mappings(config):
        name = key.replace(".init_args", "")
        before = earlier.get(name, {})
        if value is None or before.get("model_type", "") != value.get("model_type", "") != "":
            before = {}  # removed, or another architecture
        earlier[name] = whole = _merged(before, value or {})
        if whole != (value or {}):
            text = yaml.safe_dump(whole, default_flow_style=True, sort_keys=False, width=math.inf)
            yield f"--{key}={text.strip()}"


def _free_mappings(node: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        inner = f"{key}.{name}" if key else str(name)
        if name in FREE_FORM and (value is None or isinstance(value, dict)):
            yield inner, value
        elif isinstance(value, dict) and name != "sources":  # of a mixture, replaced as a whole
            yield from _free_mappings(value, inner)


def _merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key; other values are replaced."""
    both = {
        name: _merged(before[name], value)
        for name, value in after.items()
        if isinstance(value, dict) and isinstance(before.get(name), dict)
    }
    return {**before, **after, **both}


def lists_in(value: Any, key: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield each list that is a value, with its full key."""
    if isinstance(value, list):
        yield key, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from lists_in(one, f"{key}.{name}" if key else str(name))


def _is_object(item: Any) -> bool:
    """Return whether an item of a list may be an object, given by its keys or the bare class."""
    return isinstance(item, dict) or bool(re.fullmatch(r"(\w+\.)*[A-Z]\w*", str(item)))


def value_of(text: str) -> Any:
    """Return the value of an argument; the parser reports one that is no YAML.

    Raises:
        UserError: a number in a list or mapping is none to the eye. Of a single value the parser
            knows whether it is a text.
    """
    try:
        root, value = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None
    if not isinstance(root, yaml.ScalarNode):
        refuse_other_bases(root, None)
    return value


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


def find_config(name: str) -> Path:
    """Return the file with that name, else the bundled config; ``.yaml`` may be left out."""
    name = at_home(name)
    folders = (Path(), BUNDLED)
    candidates = [folder / one for folder in folders for one in (name, f"{name}.yaml")]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None and Path(name).exists() and not Path(name).is_dir():
        raise UserError(
            f"{name}: a config must be a file, got a pipe or a device (it is read more than once, "
            "and by each process of a run). Write it to a file, and give that."
        )
    if path is None and Path(name).is_dir():
        inside = [str(one) for one in sorted(Path(name).glob("*.yaml"))]
        hint = f" In it are {list_some(inside, 5)}." if inside else " There is no .yaml file in it."
        raise UserError(f"{name} is a directory, but a config is a file.{hint}")
    if path is None:
        known = bundled_configs()
        stem = name.removesuffix(".yaml")
        same = [one for one in known if one.rpartition("/")[2] == stem]
        hint = f" Did you mean {same[0]}?" if same else did_you_mean(stem, known)
        beside = [str(one) for one in Path(name).parent.glob("*.y*ml")]
        hint = did_you_mean(name, beside, similarity=0.8) or hint
        if not hint and beside and Path(name).parent != Path():
            hint = f" In {Path(name).parent} are {list_some(sorted(beside), 5)}."
        hint = hint or f" Bundled configs: {', '.join(known)}."
        raise UserError(f"{name}: no such config.{hint}")
    return path


def read_config(path: Path) -> dict[str, Any]:
    """Read one config file.

    Raises:
        UserError: the file is not a YAML mapping, has a key twice or without what belongs under
            it, or interpolates a secret.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        refuse_odd_spaces(root, path)
        refuse_repeated_keys(root, path)
        refuse_other_bases(root, path)
        config = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        refuse_odd_indents(text.splitlines()[:line], path)
        raise UserError(f"{path}, line {line}: {error.problem} (not valid YAML).") from error
    except UserError:
        raise
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8. Save the file as UTF-8.") from error
    except (OSError, ValueError, yaml.YAMLError) as error:  # such as of 2024-13-45, no date
        raise UserError(f"{path}: cannot be read as YAML: {error}") from error
    except RecursionError:
        raise UserError(f"{path}: cannot be read as YAML: it is nested too deeply.") from None
    if not isinstance(config, dict):
        got = "an empty file" if config is None else f"the {type(config).__name__} {config!r:.40}"
        raise UserError(f"{path}: a config must be a mapping of keys to values, got {got}.")
    refuse_empty(config, "", path)
    refuse_misplaced(config, path)
    refuse_paths_as_sources(config, path)
    refuse_other_forms(config, str(path))
    refuse_beside(config, "", str(path))
    refuse_secrets(config, str(path))
    return config
