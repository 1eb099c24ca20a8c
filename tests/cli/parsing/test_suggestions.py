"""Which key is suggested in place of one that does not exist."""

from __future__ import annotations

import cli_base
import pytest
import yaml
from jsonargparse import ArgumentParser

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.suggestions import (
    class_keys,
    elsewhere,
    keys,
    suggest,
    suggest_key,
    suggest_value,
)
from lit_grpo.training import SFTModule

KNOWN = [
    "model.group_size",
    "model.rewards",
    "model.evaluation.accuracy.reward",
    "model.sampling.max_tokens",
    "trainer.max_steps",
    "run_dir",
]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("model.group_sise", " Did you mean group_size?"),
        ("model.reward", " Did you mean rewards?"),
        ("modle.group_size", " Did you mean model.group_size?"),
        ("modle.nothing", " Did you mean model?"),
        ("model.max_tokens", " Did you mean model.sampling.max_tokens?"),
        ("trainer.run_dir", " run_dir belongs at the top level."),
        ("model.trainer.max_steps", " trainer belongs at the top level."),
        ("model.xyzzy", ""),
        ("model.group_size", ""),
    ],
)
def test_a_slip_comes_before_a_key_of_that_name_elsewhere_and_that_before_one_alike(key, hint):
    assert suggest(key, KNOWN) == hint


def test_a_section_belongs_at_the_top_level():
    assert elsewhere("data") == " data belongs at the top level."
    assert elsewhere("data.train") == " Did you mean data.train?"


class Optimizer:
    def __init__(self, lr: float = 0.1, weight_decay: float = 0.0) -> None: ...


def parser_of(kind: type, name: str | None = None) -> ArgumentParser:
    parser = ArgumentParser()
    parser.add_class_arguments(kind, name)
    return parser


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("learning_rate", " Did you mean lr?"),
        ("lrr", " Did you mean lr?"),
        ("batch_size", " Set data.prompts_per_step."),
        ("beta", " Set model.objective.kl.coef."),
        ("group_size", " Did you mean model.group_size?"),
        ("data", " data belongs at the top level."),
    ],
)
def test_of_a_class_the_keys_of_the_whole_config_are_suggested_too(key, hint):
    assert suggest_key(parser_of(Optimizer), key) == hint


def test_in_a_config_of_sft_a_key_of_grpo_is_no_mistake_in_spelling():
    parser = parser_of(SFTModule, "model")
    parser.add_argument("--trainer.max_steps", type=int)
    assert suggest_key(parser, "model.group_size") == " Only GRPO has it: lit-grpo fit."
    assert suggest_key(parser, "model.target_colum") == " Did you mean target_column?"


def test_keys_are_the_options_without_their_dashes():
    assert {"lr", "weight_decay"} <= {*keys(parser_of(Optimizer))}


class Server:
    def __init__(self, urls: list[str]) -> None: ...


class Engine:
    def __init__(self, server: Server | None = None, engines: list[Server] = ()) -> None: ...


def test_keys_of_classes_are_those_of_the_classes_within_but_not_in_lists():
    parser = ArgumentParser()
    parser.add_argument("--model.engine", type=Engine)
    parser.add_argument("--model.engines", type=list[Engine])
    parser.add_argument("--trainer.engine", type=Engine)
    found = [*class_keys(parser)]
    assert found == ["model.engine.server", "model.engine.server.urls", "model.engine.engines"]


@pytest.mark.parametrize("key", ["group_size", "objective.kl.coef"])
def test_sft_says_of_a_key_of_grpo_where_it_belongs(key, here, capsys):
    base = cli_base.BASE | {"model": {"policy": cli_base.BASE["model"]["policy"]}}
    (here / "sft.yaml").write_text(yaml.safe_dump(base))
    assert main(["sft", "--config=sft.yaml", f"--model.{key}=4"]) == 2
    error = capsys.readouterr().err
    assert error == f"error: model.{key}: no such key. Only GRPO has it: lit-grpo fit.\n"


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("model.objective.surrogate", "ppo", " Did you mean clip?"),
        ("model.objective.kl.estimator", "low_var_kl", " Did you mean k3?"),
        ("objective.aggregation", "seq-mean-token-sum", " Did you mean sequence_sum?"),
        ("model.advantage.deviation", "False", " Did you mean none?"),
        (
            "model.advantage.baseline",
            "rloo",
            " Did you mean leave_one_out? The whole method: --config presets/rloo.",
        ),
        ("model.objective.kl", "mse", " Did you mean model.objective.kl.estimator: k2?"),
        ("model.objective.surrogate", "clp", ""),
        ("trainer.precision", "ppo", ""),
    ],
)
def test_a_value_of_another_library_has_its_counterpart_and_the_preset_of_its_method(
    key, value, hint
):
    assert suggest_value(key, value) == hint


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["--model.objective.surrogate=ppo"], "got ppo. Did you mean clip?"),
        (["--model.objective.aggregation=token-mean"], "got token-mean. Did you mean token?"),
        (
            ["--model.advantage=rloo"],
            "Did you mean model.advantage.baseline: leave_one_out? The"
            " whole method: --config presets/rloo.",
        ),
        (["--model.kl_loss_coef=0.1"], "no such key. Set model.objective.kl.coef."),
    ],
)
def test_a_name_of_another_library_is_told_its_counterpart(arguments, end, here, capsys):
    (here / "base.yaml").write_text(yaml.safe_dump(cli_base.BASE))
    assert main(["fit", "--config=base.yaml", *arguments]) == 2
    assert capsys.readouterr().err.rstrip("\n").endswith(end)
