"""What a config has in the wrong place is named, with the right one."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_errors import error_of

PLACES = {
    "model: {data: {class_path: AdditionData, init_args: {num_digits: 1}}}": "data belongs at",
    "model: {trainer: {max_steps: 3}}": "model.trainer: no such key. trainer belongs at the top",
    "model: {seed_everything: 3}": "seed_everything belongs at the top level, not under model.",
    "trainer: {model: {group_size: 3}}": "trainer.model: no such key. model belongs at the top",
    "rewards: [MathReward]": "rewards: no such key. Did you mean model.rewards?",
    "policy: {path: a}": "policy.path: no such key. Did you mean model.policy.path?",
    "group_size: 4": "group_size: no such key. Did you mean model.group_size?",
    "trainer: {rewards: [MathReward]}": "trainer.rewards: no such key. Did you mean model.rewards?",
    "data: {class_path: AdditionData, init_args: {group_size: 3}}": (
        "data: AdditionData.group_size: no such key. Did you mean model.group_size?"
    ),
    "data: {class_path: AdditionData, init_args: {trainer: 3}}": (
        "data: AdditionData.trainer: no such key. trainer belongs at the top level."
    ),
}


@pytest.mark.parametrize("config", PLACES)
def test_a_key_in_another_section_is_told_where_it_belongs(config, capsys):
    assert PLACES[config] in error_of(capsys, config=config)


@pytest.mark.parametrize(
    ("source", "file"),
    [("sums.jsonl", "sums.jsonl"), ("no.csv", "no.csv"), ("[sums.jsonl]", "FILE"), ("5", "FILE")],
)
def test_a_source_that_is_a_path_is_shown_as_a_source(source, file, capsys):
    Path("sums.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n' * 2)
    whole = "{data: {class_path: AdditionData}}"
    sources = f"{{sources: {{a: {whole}, b: {source}}}}}"
    line = error_of(capsys, config=f"data: {{class_path: MixtureData, init_args: {sources}}}")
    assert line.startswith("my.yaml: data.sources.b must be a source, got ")
    assert f"Write {{data: {{class_path: PromptData, init_args: {{train: {file}}}}}}}." in line


def test_a_key_on_the_command_line_is_told_where_it_belongs(capsys):
    line = error_of(capsys, "--model.data.num_digits=2")
    assert line == "model.data.num_digits: no such key. data belongs at the top level."


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("data: {init_args: 'prompts_per_step:8'}", "data.init_args must have keys under it, got"),
        ("trainer:\nrun_dir: x", "Indent the lines that belong under it"),
    ],
)
def test_a_slip_of_spaces_is_named_with_its_place(config, expected, here, capsys):
    error = error_of(capsys, config=config)
    assert error.startswith("my.yaml: ")
    assert expected in error
