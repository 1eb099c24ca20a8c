"""Reword errors about classes and functions: which is meant, where it is found, what it takes."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_args

from lit_grpo.cli.parsing.merging import REWARDS
from lit_grpo.cli.parsing.suggestions import suggest_value
from lit_grpo.cli.parsing.type_hints import (
    class_names,
    find_object,
    literals,
    takes_function,
    type_of,
)
from lit_grpo.cli.parsing.value_errors import (
    DATA_EXAMPLE,
    explain_wrong_type,
    is_null_in_words,
)
from lit_grpo.data import PromptData
from lit_grpo.diagnostics.causes.cause import Action
from lit_grpo.rewards import Reward
from lit_grpo.rewards.functions.reward import constructor_call
from lit_grpo.types.spelling import did_you_mean

SOURCE = r"'(?P<name>\w+)': Namespace\(class_path='[\w.]+MixtureSource'"
"""The name of a source of a mixture where the parser shows what it was given."""


def explain_nested(parser: Any, key: str, match: re.Match[str]) -> str:
    """Reword the error of a class; of several that may be meant, the one that is likeliest."""

    def likelihood(one: re.Match[str]) -> tuple[bool, bool]:
        return "no such key" not in one["inner"], "Did you mean" in one["inner"]

    best = max(match.re.finditer(match.string), key=likelihood)
    if key == "data" and best["path"].endswith(".LightningDataModule"):
        # The class that stands for every kind of data.
        return explain_no_class_path(parser, key, match)
    name, inner = best["path"].rsplit(".", 1)[-1], best["inner"]
    setting = inner.partition(": no such key")[0]
    if name == "MixtureData" and _is_of_rows(setting):
        where = f"Each source has its own: set data.sources.NAME.data.{setting}."
        return f"{key}: {name}.{setting}: no such key. {where}"
    hint = about_settings(best["path"], setting)
    if inner.startswith("save_dir: required"):
        hint = f" Set --{key}.save_dir tb, or in a config init_args: {{save_dir: tb}}."
    return f"{key}: {name}.{inner}{hint}"


def _is_of_rows(setting: str) -> bool:
    """Return whether a setting belongs to the data of a source of a mixture."""
    return setting in inspect.signature(PromptData).parameters


def about_settings(path: str, setting: str) -> str:
    """Return how a user's reward class can accept a setting that every reward has."""
    kind = find_object(path)
    is_reward = isinstance(kind, type) and issubclass(kind, Reward)
    is_own = is_reward and not kind.__module__.startswith("lit_grpo.")
    if not is_own or setting not in inspect.signature(Reward).parameters:
        return ""
    return (
        " Every reward has it, if its __init__ accepts the settings and passes them on: "
        "def __init__(self, ..., **settings): super().__init__(**settings)."
    )


def explain_source(parser: Any, key: str, match: re.Match[str]) -> str:
    """Reword the error of a source of a mixture, and name the source."""
    source, inner = f"{key}.sources.{match['name']}", match["inner"]
    setting = inner.partition(": no such key")[0]
    if _is_of_rows(setting):
        inner = f"{setting}: no such key. Set {source}.data.{setting}."
    return f"{source}.{inner}"


def explain_empty_source(parser: Any, key: str, match: re.Match[str]) -> str:
    """Reword the error of a source without rows, which a mistyped name on the command line adds."""
    names = re.findall(SOURCE, match.string)
    hint = did_you_mean(match["name"], [one for one in names if one != match["name"]])
    return f"{key}.sources.{match['name']}.data: required, but not set.{hint}"


def explain_no_class_path(parser: Any, key: str, match: re.Match[str]) -> str:
    hint = ""
    if key == "data":
        hint = f" In a file: {DATA_EXAMPLE}; without one: --data PromptData --data.train FILE."
    if key == "model.engine":
        hint = (
            " The default engine must be named, too, to be set: --model.engine HFEngine "
            "--model.engine.max_concurrent 64."
        )
    return (
        f"{key}: expected class_path and, under init_args, its arguments, and no other keys.{hint}"
    )


def explain_abstract_class(parser: Any, key: str, match: re.Match[str]) -> str:
    hint = type_of(parser, key)
    of_key = [one.__name__ for one in (hint, *get_args(hint)) if isinstance(one, type)]
    name = (match["path"] or match["value"] or "").strip().rsplit(".", 1)[-1]
    if key == "data" or not name or name in of_key:  # stands for every class, since none was named
        return explain_no_class_path(parser, key, match)
    known = ", ".join(sorted(set(class_names(hint))))
    return f"{key}: {name} is only the base class of others. Choose from {known}."


def explain_bad_import(parser: Any, key: str, match: re.Match[str]) -> str:
    if match["reason"].startswith("'str' object has no attribute 'keys'"):
        return (
            f"{key}: init_args of {match['path']} must be keys with their values, got a string. "
            "Write each as KEY: VALUE, with a space after the colon."
        )
    hint = ""
    missing = re.match(r"module '(.+)' has no attribute '(.+)'", match["reason"])
    if missing and missing[1] in sys.modules:
        hint = suggest_attribute(*missing.groups())
    elif match["reason"].startswith("No module named"):
        # A file's own directory is the working directory while it is read.
        hint = f" Looked for it in {sys.path[0]} and beside the config files."
    return f"{key}: {match['path']} cannot be imported: {match['reason'].rstrip('.')}.{hint}"


def suggest_attribute(module: str, name: str) -> str:
    """Suggest a name of a module instead of one that does not exist."""
    if name == "py":
        return f" Leave out .py: {module}.NAME."
    return did_you_mean(name, vars(sys.modules[module]) if module in sys.modules else {})


def explain_unknown_class(parser: Any, key: str, match: re.Match[str]) -> str:
    name, expected = match["value"], type_of(parser, key)
    if takes_function(expected):
        return explain_no_function(parser, key, match)
    if is_null_in_words(name, expected):
        return explain_wrong_type(parser, key, match)
    known = sorted(set(class_names(expected)))
    hint = did_you_mean(name, known)
    if not hint and any(plain in get_args(expected) for plain in (bool, int, float, str)):
        return explain_wrong_type(parser, key, match)
    if name in set(class_names(Reward)):  # and not among the classes that are expected
        return f"{key}: {name} is a reward. Put it into model.rewards: --model.rewards+={name}."
    if "Rule" in known:
        hint = did_you_mean(name, get_args(Action)).replace("Did you mean", "Action: did you mean")
        return (
            f"{key}: expected the keys patience and action of a rule, got {name}; an action is one "
            f"of {', '.join(get_args(Action))}, as in {{truncated: {{action: stop}}}}.{hint}"
        )
    if name in ("true", "yes", "on") and len(known) == 1:
        return f"{key}: expected the keys of {known[0]}, got {name}. Write {{}} for its defaults."
    few = f" Known: {', '.join(known)}." if len(known) <= 20 else ""
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        rule = f"the keys of {known[0]}" if len(known) == 1 else "a class"
        return f"{key}: expected {rule}, got {name}.{few if len(known) > 1 else ''}"
    yours = "class or function" if key == REWARDS else "class"
    path = f"{few} A {yours} of yours needs its path, such as my_module.{name}."
    return f"{key}: no class is called {name}.{hint or path}"


def explain_wrong_class(parser: Any, key: str, match: re.Match[str]) -> str:
    path = match["path"]
    hint = _as_reward(path, find_object(path)) if match["base"] == "Reward" else ""
    return f"{key}: {path} is not a {match['base']}.{hint}"


def _as_reward(path: str, given: object) -> str:
    """Return how a function, an object or a class of the user's becomes a reward."""
    if callable(given) and not isinstance(given, type):
        what = "A function" if inspect.isfunction(given) else "An object with __call__"
        init_args = f"{{function: {path}}}"
        return f" {what} is given as {{class_path: FunctionReward, init_args: {init_args}}}."
    if not isinstance(given, type) or path.startswith("lit_grpo."):
        return ""
    if not any("__call__" in vars(kind) for kind in given.__mro__):
        score = "score(self, prompt, completion)"
        return f" Derive it from lit_grpo.rewards.Reward, and define {score}."
    module, _, name = path.rpartition(".")
    return (
        f" A class with __call__ is given as an object of it: write {name.lower()} = "
        f"{constructor_call(given)} in {module}, and give {module}.{name.lower()}."
    )


def explain_rate(parser: Any, key: str, match: re.Match[str]) -> str:
    return f"{key}: expected a class, got {match['value']}. The learning rate is {key}.lr."


def explain_bad_callable(parser: Any, key: str, match: re.Match[str]) -> str:
    reason = re.sub(r"<class '([^']+)'>", r"\1", match["reason"])
    reason = reason.replace("Expected an import path or a subclass spec, but", "expected a class,")
    return f"{key}: {reason.rstrip('.')}."


def explain_no_function(parser: Any, key: str, match: re.Match[str]) -> str:
    """Reword what is neither a choice nor the path of a function."""
    path, choices = match["value"], list(literals(type_of(parser, key)))
    module, _, name = path.rpartition(".")
    why = "." + (suggest_value(key, path) or did_you_mean(path, choices))
    if "reason" in match.groupdict():
        why = f": {match['reason'].rstrip('.')}.{suggest_attribute(module, name)}"
    rule = ", ".join(choices) + " or the path of a function, such as my_file.my_function"
    return f"{key}: expected {rule}, got {path}{why}"


def explain_not_dotted(parser: Any, key: str, match: re.Match[str]) -> str:
    path = match["value"]
    place, _, name = path.rpartition(":")
    fix = f" Write {Path(place).stem}.{name}." if name.isidentifier() and place else ""
    return f"{key}: expected the path of a class, such as my_module.MyClass, got {path}.{fix}"
