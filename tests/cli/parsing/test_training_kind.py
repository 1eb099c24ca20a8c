"""Whether the keys of ``model`` are those of GRPO or of SFT."""

from __future__ import annotations

import pytest
import yaml

from lit_grpo.cli.parsing.invocation import Invocation, read_invocation
from lit_grpo.cli.parsing.training_kind import choose_model, keys_of_grpo
from lit_grpo.training import GRPOModule, SFTModule
from lit_grpo.types import UserError

GRPO = {"rewards": ["MathReward"]}
SFT = {"target_column": "solution"}
NEITHER = {"seed": 1}


@pytest.fixture
def invoked(here):
    def read(*models: dict, arguments=()) -> Invocation:
        names = []
        for number, model in enumerate(models):
            (here / f"{number}.yaml").write_text(yaml.safe_dump({"model": model}))
            names.append(f"--config={number}.yaml")
        return read_invocation([*names, *arguments])

    return read


@pytest.mark.parametrize(
    ("command", "model", "kind"),
    [
        ("fit", GRPO, GRPOModule),
        ("fit", NEITHER, GRPOModule),  # so that the error is that rewards are missing
        ("sft", SFT, SFTModule),
        ("sft", NEITHER, SFTModule),
        ("validate", GRPO, GRPOModule),
        ("validate", SFT, SFTModule),
        ("test", NEITHER, SFTModule),
        ("doctor", NEITHER, SFTModule),
        ("doctor", {"group_size": 4}, GRPOModule),
        ("plan", {"sampling": {"max_tokens": 4}}, SFTModule),
        ("rewards", NEITHER, GRPOModule),
    ],
)
def test_the_command_tells_or_else_the_keys(command, model, kind, invoked):
    assert choose_model(command, invoked(model)) is kind


def test_a_key_of_the_command_line_counts_too(invoked):
    arguments = ["--model.group_size=4"]
    assert choose_model("plan", invoked(NEITHER, arguments=arguments)) is GRPOModule
    arguments = ["--model.class_path=mine.Module"]
    assert choose_model("validate", invoked(NEITHER, arguments=arguments)) is GRPOModule


@pytest.mark.parametrize(
    ("command", "models", "message"),
    [
        ("fit", [SFT], r"fit needs the config of a GRPO .* Use lit-grpo sft\."),
        ("sft", [GRPO], r"sft needs the config of an SFT run, .* Use lit-grpo fit, or give"),
        ("validate", [GRPO, SFT], "the configs must belong to one training"),
    ],
)
def test_a_config_of_the_other_kind_is_refused_with_its_command(command, models, message, invoked):
    with pytest.raises(UserError, match=message):
        choose_model(command, invoked(*models))


def test_keys_of_both_are_no_keys_of_grpo():
    assert {"rewards", "group_size", "objective"} <= keys_of_grpo()
    assert keys_of_grpo().isdisjoint({"policy", "optimizer", "engine", "target_column", "seed"})
