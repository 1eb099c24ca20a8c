"""A key that does not exist is refused, also with nothing under it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cli_base
import pytest
import yaml
from jsonargparse import ArgumentError

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.strict import StrictParser


@dataclass
class Inner:
    size: int = 1
    free: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    number: int = 2


def parse(config: dict[str, Any]) -> Outer:
    parser = StrictParser(exit_on_error=False)
    parser.add_class_arguments(Outer, "outer")
    return parser.instantiate_classes(parser.parse_object({"outer": config})).outer


@pytest.mark.parametrize("value", [{}, {"x": 1}, 1])
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_unknown_key_is_refused_whatever_is_under_it(is_nested, value):
    config = {"inner": {"sise": value}} if is_nested else {"sise": value}
    key = "inner.sise" if is_nested else "sise"
    said = rf"'outer\.{key}' is not accepted|does not accept option '{key}"
    with pytest.raises(ArgumentError, match=said):
        parse(config)


@pytest.mark.parametrize(
    "config", [{}, {"inner": {}}, {"inner": {"free": {}}}, {"inner": {"free": {"a": {}}}}]
)
def test_a_known_key_may_have_nothing_under_it(config):
    assert (parse(config).inner.size, parse(config).number) == (1, 2)


def test_known_keys_may_have_empty_mappings(here, capsys):
    empty = "{policy: {lora: {}}, optimizer: {}, sampling: {}, objective: {kl: {}}}"
    Path("empty.yaml").write_text(f"trainer: {{}}\nmodel: {empty}\n")
    Path("base.yaml").write_text(yaml.safe_dump(cli_base.BASE))
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config=base.yaml", "--config=empty.yaml", "--print_config"])
    policy = yaml.safe_load(capsys.readouterr().out)["model"]["policy"]
    assert policy["init_args"]["lora"]["rank"]
