"""Type hints in the words of messages, and the choices and classes that they allow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
from jsonargparse import ArgumentParser
from torch import Tensor

from lit_grpo.cli.parsing.type_hints import (
    admits_null,
    class_names,
    default_of,
    literals,
    takes_function,
    type_name,
    type_of,
)


class Engine(ABC):
    @abstractmethod
    def start(self) -> None: ...


class Local(Engine):
    def start(self) -> None: ...


class Served(Local):
    pass


class _Hidden(Engine):
    def start(self) -> None: ...


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        (int, "int"),
        (None | float, "null or float"),
        (Literal["clip", "cispo"], "one of clip, cispo"),
        (Literal["auto"] | int, "one of auto or int"),
        (float | Tensor, "float"),
        (list[Engine], "list[Engine]"),
        (tuple[Engine, ...], "list[Engine]"),
        (dict[str, Any], "dict[str, Any]"),
    ],
)
def test_a_hint_has_a_name_without_modules_and_tensors(hint, name):
    assert type_name(hint) == name


def test_choices_are_found_within_other_types():
    hint = Literal["a", "b"] | list[Literal["c", 1]] | None
    assert [*literals(hint)] == ["a", "b", "c", "1", "null"]
    assert [*literals(int)] == []


@pytest.mark.parametrize("hint", [Engine, Engine | None, list[Engine], dict[str, Sequence[Engine]]])
def test_classes_are_all_that_can_be_made_and_are_not_private(hint):
    assert [*class_names(hint)] == ["Local", "Served"]


def test_a_builtin_is_no_class_to_name():
    assert [*class_names(int | str | None)] == []


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (Callable[..., Any], True),
        (Literal["clip"] | Callable[..., Any], True),
        (Callable[[int], Engine], False),  # a class is meant
        (str, False),
    ],
)
def test_a_function_is_meant_if_it_may_return_anything(hint, expected):
    assert takes_function(hint) == expected


def test_the_hint_and_the_default_of_a_key_are_those_of_its_option():
    parser = ArgumentParser()
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--engine", type=Engine | None)
    assert type_of(parser, "size") is int
    assert type_of(parser, "engine") == Engine | None
    assert type_of(parser, "nothing") is None
    assert (default_of(parser, "size"), default_of(parser, "engine")) == (3, None)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (int | None, True),
        (None, False),  # an option without a type
        (Engine | Literal["a"] | None, True),
        (list[int | None], False),
        (str, False),
    ],
)
def test_null_is_a_value_where_it_is_one_of_several_types(hint, expected):
    assert admits_null(hint) == expected
