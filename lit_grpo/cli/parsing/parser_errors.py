"""Reword errors of the argument parser and of OmegaConf: the key, what is wrong, a suggestion."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from lit_grpo.cli.errors import broken_import, one_line
from lit_grpo.cli.parsing.class_errors import (
    SOURCE,
    explain_abstract_class,
    explain_bad_callable,
    explain_bad_import,
    explain_empty_source,
    explain_nested,
    explain_no_function,
    explain_not_dotted,
    explain_rate,
    explain_source,
    explain_unknown_class,
    explain_wrong_class,
)
from lit_grpo.cli.parsing.suggestions import (
    keys,
    suggest,
    suggest_key,
    unknown_section,
)
from lit_grpo.cli.parsing.value_errors import (
    explain_no_section,
    explain_null_as_text,
    explain_other_base,
    explain_wrong_type,
    missing_keys,
)
from lit_grpo.types.spelling import did_you_mean

BEGIN, END = "\x02", "\x03"
"""Marks around an error message that the parser of a nested class has already reworded."""

MAPPING = re.compile(r"Unable to load config .*?\n\s*- (?=Parser key)", re.DOTALL)
"""The parser's words for a mapping that was given as one value, before the key inside it."""


def quote(line: str) -> str:
    """Mark a line as reworded, so that ``explain`` of the outer parser keeps it."""
    return f"{BEGIN}{line}{END}"


def explain(parser: Any, message: str, cause: BaseException | None) -> str:
    """Reword a jsonargparse error: the key, then what is wrong, then a suggestion."""
    broken = broken_import(cause)
    if broken:
        return broken
    message = MAPPING.split(message)[-1]
    if reworded := re.fullmatch(rf"{BEGIN}([^{END}]*){END}", message):
        return reworded[1]
    found = re.search(r'Parser key "([^"]+)"', message)
    key = found.group(1) if found else ""
    for pattern, word in RULES:
        match = re.search(pattern, message, re.DOTALL)
        if match:
            return one_line(word(parser, key, match))
    return one_line(message.removeprefix("argument --"))


def explain_interpolation(parser: Any, error: Any) -> str:
    """Reword an OmegaConf error."""
    reason = str(error.msg).splitlines()[0]
    if missing := re.match(r"Interpolation key '(.+)' not found", reason):
        hint = suggest(missing[1], keys(parser))
        return f"{error.full_key}: ${{{missing[1]}}} names no key.{hint}"
    if unset := re.search(r"Environment variable '(.+)' not found", reason):
        return (
            f"{error.full_key}: the environment variable {unset[1]} is not set. Set it, or give a "
            f"value to take without it: ${{oc.env:{unset[1]},VALUE}}"
        )
    reason = reason.split("interpolation: ")[-1].strip('"')
    return f"{error.full_key}: cannot interpolate: {reason}"


def explain_no_keys(parser: Any, key: str, match: re.Match[str]) -> str:
    return f"{key}: expected the keys of {match['base']}, got {match['value'].strip()}."


def explain_unknown_key(parser: Any, key: str, match: re.Match[str]) -> str:
    full_key = ".".join(filter(None, [match["group"], match["key"]]))
    hint = suggest_key(parser, full_key)
    section, siblings = unknown_section(parser, full_key)
    if section != full_key:
        of_section = did_you_mean(section.rsplit(".", 1)[-1], siblings)
        if of_section or not hint:
            return f"{section}: no such key.{of_section}"
    hint = hint or did_you_mean(full_key.split(".")[0], ("class_path", "init_args"))
    return f"{full_key}: no such key.{hint}"


def explain_unknown_argument(parser: Any, key: str, match: re.Match[str]) -> str:
    argument = match["argument"].split("=")[0]
    if not argument.startswith("--"):
        fix = "Use --config FILE and --KEY VALUE."
        if argument.lower() in ("true", "false"):
            fix = f"Flags such as --allow_changes take no value. Leave {argument} out."
        elif argument.endswith((".yaml", ".yml")):
            fix = f"Each file needs the word before it: --config {argument}."
        elif os.path.isfile(argument):  # a shell has put several names in place of a pattern
            fix = f"Several files are one list, in quotes: --data.train '[a.jsonl, {argument}]'."
        return f"{argument}: unexpected argument. {fix}"
    argument = argument.removeprefix("--")
    if argument == "preset":
        given = match["argument"].partition("=")[2] or "NAME"
        return f"preset: no such key. A preset is a config: --config presets/{given}."
    return f"{argument}: no such key.{suggest_key(parser, argument)}"


def explain_no_text_key(parser: Any, key: str, match: re.Match[str]) -> str:
    return (
        f"a key of the config must be text, got {match['value']}. Write decimals with a "
        "point (a comma between braces begins the next key), and keys such as 1 or no in quotes."
    )


Rule = Callable[[Any, str, "re.Match[str]"], str]
"""Reword an error, given the parser, the key that it names (may be empty) and the match."""
RULES: tuple[tuple[str, Rule], ...] = (
    (r'Parser key "model\.optimizer".*: (?P<value>[+-]?[\d.]+(e[+-]?\d+)?)$', explain_rate),
    (  # sources before it have become namespaces
        rf"MixtureSource\.(?P<inner>[^{END}]*){END}.*Given value: .*?"
        r"('sources': \{|__subclasses_disabled__=True\), )'(?P<name>\w+)': \{",
        explain_source,
    ),
    (
        rf"MixtureSource\.data: required.*{SOURCE}, init_args=Namespace\(data=None",
        explain_empty_source,
    ),
    (rf"class_path '(?P<path>[^']+)':\s*{BEGIN}(?P<inner>[^{END}]*){END}", explain_nested),
    (rf"{BEGIN}(?P<inner>[^{END}]*){END}.*class_path='(?P<path>[^']+)'", explain_nested),
    (r"(?P<why>YAML reads \S+ as .+?, else [^\n]+?\.)(\s|$)", explain_other_base),
    (r"Null as text", explain_null_as_text),
    (r"Got value: (?P<value>None)$", explain_wrong_type),
    (
        r"Expected an instantiatable class, but (?P<path>\S+ )?is abstract"
        r"(.*Given value: (?P<value>\w\S*)$)?",
        explain_abstract_class,
    ),
    (r"class_path '(?P<path>[^']+)':\s*(?P<reason>[^\n]+)", explain_bad_import),
    (r"Not a valid subclass of (?P<base>\w+)\. Got value: (?P<value>\{[^\n]*)\n", explain_no_keys),
    (r"Key must be a string, got: (?P<value>.+)\.", explain_no_text_key),
    (r"No section: (?P<value>.*)", explain_no_section),
    (r"Unable to load config ['\"](?P<value>[^\n]*)['\"]", explain_no_section),
    (r"Expected a dot import path string: (?P<value>[^\n]+?)\s*(\n|$)", explain_unknown_class),
    (
        r"subtypes.*a callable class: (?P<reason>[^\n]+).*value: (?P<value>\S+)$",
        explain_no_function,
    ),
    (r"a callable class: (?P<reason>.+)\. Got value", explain_bad_callable),
    (
        r"Import path (?P<path>\S+) does not correspond to a subclass of (?P<base>\w+)",
        explain_wrong_class,
    ),
    (r"(Group '(?P<group>.+)' does not accept o|O)ption '(?P<key>[^']+)'", explain_unknown_key),
    (r"model\.policy.*Unexpected import path format: (?P<value>\S+)", explain_wrong_type),
    (r"Unexpected import path format: (?P<value>[^\s}]+)", explain_not_dotted),
    (r"unrecognized arguments: (?P<argument>\S+)", explain_unknown_argument),
    (r"the following arguments are required: (?P<keys>.+)", missing_keys),
    (r"(Got|Given) value: (?P<value>.*?)(\n\s*Subclass types expect.*)?$", explain_wrong_type),
)
