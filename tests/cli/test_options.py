"""The options of commands: their types, and their lines in the help."""

from __future__ import annotations

import pytest

from lit_grpo.cli.commands import COMMANDS, WITHOUT_CONFIG
from lit_grpo.cli.file_options import parse_options
from lit_grpo.cli.options import OPTIONS, list_options


def test_every_option_belongs_to_a_command_and_says_what_it_is_for():
    assert {*WITHOUT_CONFIG} <= OPTIONS.keys() <= COMMANDS.keys()
    assert all(one["help"] for options in OPTIONS.values() for one in options.values())


@pytest.mark.parametrize(("text", "value"), [("12", 12), ("0.1", 0.1), ("1.0", 1.0)])
def test_a_size_is_a_number_of_prompts_or_a_fraction(text, value):
    given = parse_options("prepare", [f"--validation_size={text}"]).validation_size
    assert (given, type(given)) == (value, type(value))


def test_the_lines_of_options_are_aligned():
    heading, *lines = list_options("report").rstrip().splitlines()
    assert heading == "options:"
    assert [line.split()[0] for line in lines] == ["--steps", "--follow", "--every"]
    assert lines[0].index("draw") == lines[1].index("write") == lines[2].index("how")
    assert lines[2].startswith("  --every SECONDS  how often --follow")
    assert list_options("report").endswith("\n\n")
