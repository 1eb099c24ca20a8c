"""Reword errors of the argument parser about a value: one that is missing, or of another type."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from lit_grpo.cli.errors import one_line
from lit_grpo.cli.parsing.paths import PATHS
from lit_grpo.cli.parsing.suggestions import keys, suggest_value
from lit_grpo.cli.parsing.type_hints import (
    admits_null,
    admits_text,
    class_names,
    default_of,
    find_object,
    literals,
    type_name,
    type_of,
)
from lit_grpo.training.checks.strategies import PRECISIONS
from lit_grpo.types.spelling import closest, did_you_mean

DATA_EXAMPLE = "data: {class_path: PromptData, init_args: {train: train.jsonl}}"
NULL_IN_WORDS = ("none", "nil")
"""Other languages' words for null, which YAML takes for texts."""


def missing_keys(parser: Any, key: str, match: re.Match[str]) -> str:
    return not_set(match["keys"])


def not_set(names: str) -> str:
    hint = " Training without rewards is lit-grpo sft." if "model.rewards" in names else ""
    return f"{names}: required, but not set.{hint}"


def explain_no_section(parser: Any, key: str, match: re.Match[str]) -> str:
    parts = [name.removeprefix(f"{key}.") for name in keys(parser) if name.startswith(f"{key}.")]
    known = list(dict.fromkeys(part.split(".")[0].rstrip("+") for part in parts))
    few = ", ".join(known[:4]) + (", …" if len(known) > 4 else "")
    if match["value"] == "None" and key == "data":
        return f"{not_set(key)} Give --config FILE, with a section such as {DATA_EXAMPLE}."
    if match["value"] == "None":
        return (
            f"{key}: expected keys under it ({few}), got nothing. Indent them by two spaces more, "
            "or remove it for the defaults."
        )
    is_coef = "coef" in known and re.fullmatch(r"[\d.e-]+", match["value"])
    hint = f" Set {key}.coef to it." if is_coef else suggest_value(key, match["value"])
    return f"{key}: expected keys under it ({few}), got {match['value']}.{hint}"


def is_null_in_words(value: str, expected: Any) -> bool:
    """Return whether a value is null in the words of another language, where null may stand."""
    return value.lower() in NULL_IN_WORDS and admits_null(expected)


def is_null_as_text(key: str, value: Any, expected: Any) -> bool:
    """Return whether a value is null as Python prints it, for a path or where null may stand."""
    is_meant = admits_null(expected) or _is_path(key)
    return isinstance(value, str) and value == "None" and is_meant and admits_text(expected)


def _is_path(key: str) -> bool:
    return key.rpartition(".")[2] in PATHS


def explain_null_as_text(parser: Any, key: str, match: re.Match[str]) -> str:
    expected = type_of(parser, key)
    fix = "Write null" if admits_null(expected) else "Remove it"
    path = ", or ./None for a path of that name" if _is_path(key) else ""
    return f"{key}: expected {type_name(expected)}, got the string None. {fix}{path}."


def explain_wrong_type(parser: Any, key: str, match: re.Match[str]) -> str:
    expected, value = type_of(parser, key), one_line(match["value"])
    if is_null_in_words(value, expected):  # a text, since null itself is not an error
        return f"{key}: expected {type_name(expected)}, got the string {value}. Write null."
    if value == "None":
        return _explain_null(key, expected, default_of(parser, key))
    shown = (value if len(value) <= 60 else f"{value[:57]}...") or "''"
    if under := re.match(r"NestedArg\(key='([^']+)'", value):
        shown = f"the key {under[1]} under it"
    if key == "trainer.precision":  # Lightning has others, which `refuse_precision` refuses
        return f"{key}: expected {' or '.join(PRECISIONS)}, got {shown}."
    if key == "model.policy" and re.fullmatch(r"[\w./-]+", value):
        return f"{key}: expected keys under it, got {shown}. Set model.policy.path to it."
    return f"{key}: expected {type_name(expected)}, got {shown}.{_hint(key, expected, value)}"


def _explain_null(key: str, expected: Any, default: Any) -> str:
    if default is None:
        return not_set(key)
    fix = "Remove it for the default"
    if isinstance(default, str):  # an earlier file may have another value
        fix += f", or write it: {json.dumps(default)}"
    elif isinstance(default, bool | int | float):
        fix += f", or write it: {yaml.safe_dump(default).splitlines()[0]}"
    return f"{key}: expected {type_name(expected)}, got null. {fix}."


def _hint(key: str, expected: Any, value: str) -> str:
    """Return how a value of the expected type is written, or which one was meant."""
    kind, names = type_name(expected), list(class_names(expected))
    if expected is int and re.fullmatch(r"\d+\.0+", value):
        return f" Write {int(float(value))}."
    if kind.startswith("dict") and (named := re.findall(r"(\w+)='?([^',()]*)", value)):
        inner = ", ".join(f"{name}: {one}" for name, one in named)
        return f" Write the whole key in quotes: '{{{inner}}}'."
    if kind.startswith("dict") and value.startswith("{"):
        return " Write it in quotes, with a space after each colon: '{a: b, c: d}'."
    if kind.startswith("list") and re.fullmatch(r"[\w./:-]+(, *[\w./:-]+)+", value):
        return f" Write the list in brackets: '[{value}]'."
    if kind.startswith("list") and re.fullmatch(r"[\w./:-]+", value):
        if base := _class_expected(kind, value):
            return f" {value} is not a {base}."
        is_known = value in names or find_object(value) is not None
        meant = "" if is_known else closest(value, names, similarity=0.8)
        return f" Did you mean '[{meant}]'?" if meant else f" A list of one is '[{value}]'."
    if hint := suggest_value(key, value) or did_you_mean(value, literals(expected)):
        return hint
    longer = [one for one in names if value.isalpha() and one.lower().startswith(value.lower())]
    return f" Did you mean {longer[0]}?" if longer else ""


def _class_expected(kind: str, path: str) -> str:
    """Return the class of the items of a list, if a path is that of a class of another kind."""
    base = re.match(r"list\[(\w+)\]", kind)
    found = find_object(path)
    if base is None or not isinstance(found, type):
        return ""
    return "" if base[1] in [one.__name__ for one in found.__mro__] else base[1]


def explain_other_base(parser: Any, key: str, match: re.Match[str]) -> str:
    return f"{key}: {match['why']}"
