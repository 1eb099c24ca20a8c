"""The commands, and the names of the bundled configs."""

from __future__ import annotations

import pytest

from lit_grpo.cli.commands import (
    BUNDLED,
    COMMANDS,
    WITHOUT_CONFIG,
    bundled_configs,
    describe,
    examples,
    usage,
)


def test_a_recipe_of_training_data_is_no_config():
    assert {"quickstart", "presets/dapo"} <= set(bundled_configs())
    assert not [name for name in bundled_configs() if name.startswith("data/")]
    assert (BUNDLED / "data/open_only.yaml").is_file()


def test_names_of_presets_come_after_those_of_configs():
    names = bundled_configs()
    num_plain = sum("/" not in name for name in names)
    assert names[:num_plain] == sorted(name for name in names if "/" not in name)
    assert all("/" in name for name in names[num_plain:])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_examples_and_a_purpose_in_its_description(command):
    text = describe(command)
    assert text.lower().startswith(f"{COMMANDS[command]}.\n\n".lower())
    assert examples(command).startswith(f"  lit-grpo {command} ")
    assert examples(command) in text
    assert ("\noptions:\n" in text) == (command in WITHOUT_CONFIG)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("fit", "lit-grpo fit [RUN] [--config FILE ...] [--KEY VALUE ...]"),
        ("report", "lit-grpo report RUN ... [OPTIONS]"),
        ("prepare", "lit-grpo prepare [OPTIONS]"),
    ],
)
def test_the_usage_says_what_a_command_takes(command, line):
    assert usage(command) == line


def test_only_a_report_says_what_it_writes():
    assert "comparison-1.html" in describe("report")
    assert not any("comparison-1.html" in describe(one) for one in COMMANDS if one != "report")
