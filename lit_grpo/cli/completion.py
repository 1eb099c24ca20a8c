"""Print the shell completion script: commands, their keys, and the values that a key may have.

Arguments of nested classes are left out. jsonargparse's own completion includes them and would
recurse forever here: a reward may take a reward, which may take a reward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin

from jsonargparse import capture_parser

from lit_grpo.cli.app import import_plugins
from lit_grpo.cli.command_line import CommandLine
from lit_grpo.cli.commands import ARGUMENTS, COMMANDS, WITHOUT_CONFIG, bundled_configs
from lit_grpo.cli.errors import print_error
from lit_grpo.cli.options import OPTIONS
from lit_grpo.cli.parsing.invocation import read_invocation
from lit_grpo.cli.parsing.type_hints import class_names
from lit_grpo.runs.run_log import silence_chatter
from lit_grpo.stopping import ExitCode

CONFIGS = "_lit_grpo_config_files"
"""The shell function that lists configs; `_file` in its name makes bash treat them as paths."""


def print_completion(arguments: Sequence[str]) -> int:
    """Print the completion script for one shell and return the exit code."""
    try:
        import shtab
    except ImportError:
        return print_error("--print_completion needs shtab. Install lit-grpo[completion].")
    shell = " ".join(arguments)
    if shell not in shtab.SUPPORTED_SHELLS:
        known = ", ".join(shtab.SUPPORTED_SHELLS)
        return print_error(f"--print_completion must be one of {known}, got {shell or 'nothing'}.")
    silence_chatter()
    import_plugins()
    print(shtab.complete(_dispatcher(), shell))
    return ExitCode.DONE


def _dispatcher() -> argparse.ArgumentParser:
    """Return a parser of all commands, for completion only."""
    import shtab

    dispatcher = argparse.ArgumentParser(prog="lit-grpo")
    dispatcher.add_argument("--version", action="store_true")
    dispatcher.add_argument("--print_completion", choices=shtab.SUPPORTED_SHELLS)
    commands = dispatcher.add_subparsers()
    for name, purpose in COMMANDS.items():
        parser = commands.add_parser(name, help=purpose)
        if name in ARGUMENTS:
            nargs = {"[RUN]": "?", "RUN": None, "DATA": None, "RUN ...": "+"}[ARGUMENTS[name][0]]
            run_dir: Any = parser.add_argument("run_dir", nargs=nargs)
            run_dir.complete = shtab.DIRECTORY
        if name not in WITHOUT_CONFIG:
            _add_keys(parser, name)
        else:
            for option, settings in OPTIONS[name].items():
                parser.add_argument(option, **settings)
    return dispatcher


def _add_keys(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the keys of a command, with their choices."""
    import shtab

    source = capture_parser(lambda: CommandLine(command, read_invocation([]), "runs/NAME/0"))
    for action in source._actions:
        names = [name for name in action.option_strings if name not in ("-h", "--help")]
        if not names or action.help == argparse.SUPPRESS:
            continue
        if action.nargs == 0:
            parser.add_argument(*names, action="store_true")
            continue
        choices = sorted(set(_choices(getattr(action, "_typehint", None)))) or None
        key: Any = parser.add_argument(*names, nargs=action.nargs, choices=choices)
        if "--config" in names:
            key.complete = _config_completion(shtab.FILE)


def _config_completion(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return how shells complete a config: files as in shtab, and bundled names where simple."""
    names = " ".join(bundled_configs())
    bash = f'compgen -f -- "$1"; compgen -W "{names}" -- "$1"'
    zsh = f"compadd -- {names}; _files"
    bodies = {"bash": bash, "zsh": zsh}
    functions = {shell: f"{CONFIGS}() {{ {body}; }}" for shell, body in bodies.items()}
    return {**files, **dict.fromkeys(bodies, CONFIGS), "preamble": functions}


def _choices(hint: Any) -> Iterator[str]:
    """Yield the values that a type hint lists: literals, booleans and names of classes."""
    if get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    elif hint is bool:
        yield from ("false", "true")
    elif get_args(hint):
        for inner in get_args(hint):
            yield from _choices(inner)
    elif isinstance(hint, type) and not (is_dataclass(hint) or _is_standard(hint)):
        yield from class_names(hint)


def _is_standard(kind: type) -> bool:
    """Return whether a class is Python's own: a ``Path`` is given as text, not by its class."""
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names
