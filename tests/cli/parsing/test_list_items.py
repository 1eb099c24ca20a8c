"""An argument that is for another item of a list than the last is told which item that is."""

import pytest
import yaml
from cli_base import BASE

from lit_grpo.__main__ import main

ITEMS = [
    {"class_path": "MathReward"},
    {"class_path": "FormatReward", "init_args": {"name": "digit", "pattern": "[0-9]"}},
]
OWN = """
from lit_grpo.rewards import Reward

class Bonus(Reward):
    def __init__(self, size: float = 1.0):
        super().__init__()

    def score(self, prompt, completion):
        return 1.0
"""


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("0.init_args.weigth 2", "MathReward has no such key. Did you mean weight?"),
        ("0.weigth=2", "MathReward has no such key. Did you mean weight?"),
        ("1.zzz=2", "FormatReward has no such key. It has pattern, match, mismatch, mode, name, w"),
        (
            "0.weight 2",
            "an argument sets only the last item of a list, here FormatReward. Set weight of "
            "MathReward in a config file, with all items of model.rewards.",
        ),
        ("1.weight=2", "an argument sets the last item of a list without its number: model.rewar"),
        ("0=MathReward", "an argument sets only the last item of a list, here FormatReward. Repl"),
        ("2.weight=2", "model.rewards has only 2, numbered from 0."),
        (
            "init_args.deadline_seconds 2",
            "an argument sets only the last item of a list, here FormatReward. Set "
            "deadline_seconds of MathReward in a config file",
        ),
    ],
)
def test_the_item_is_named_with_what_it_has_and_where_to_set_it(argument, message, here, capsys):
    config = BASE | {"model": BASE["model"] | {"rewards": ITEMS}}
    (here / "my.yaml").write_text(yaml.safe_dump(config))
    words = f"--model.rewards.{argument}".split()
    assert main(["fit", "--config", "my.yaml", *words]) == 2
    name = words[0].removeprefix("--").partition("=")[0]
    assert capsys.readouterr().err.startswith(f"error: {name}: {message}")


def test_items_are_counted_over_files_and_arguments_and_may_be_of_a_class_of_the_user(
    here, add_module, capsys
):
    add_module("bonus_rewards", OWN)
    (here / "my.yaml").write_text(yaml.safe_dump(BASE))
    (here / "more.yaml").write_text("model: {rewards+: [bonus_rewards.Bonus]}")
    files = ["--config", "my.yaml", "--config", "more.yaml"]
    more = ["--model.rewards+=LengthReward", "--model.rewards.1.sizes=2"]
    assert main(["fit", *files, *more]) == 2
    line = "error: model.rewards.1.sizes: bonus_rewards.Bonus has no such key. Did you mean size?\n"
    assert capsys.readouterr().err == line
    assert main(["fit", *files, "--model.rewards=[FormatReward]", "--model.rewards.1.name=a"]) == 2
    assert "model.rewards has only 1," in capsys.readouterr().err


def test_of_a_last_item_whose_class_is_not_found_nothing_else_is_said(here, capsys):
    items = [ITEMS[0], {"class_path": "no_such_module.Bonus"}]
    (here / "my.yaml").write_text(
        yaml.safe_dump(BASE | {"model": BASE["model"] | {"rewards": items}})
    )
    assert main(["fit", "--config", "my.yaml", "--model.rewards.init_args.weight=2"]) == 2
    assert "only the last item" not in capsys.readouterr().err


def test_callbacks_are_told_the_same(here, capsys):
    assert main(["fit", "--config", "debug", "--trainer.callbacks.0.wrong=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: trainer.callbacks.0.wrong: Checkpoints has no such key. It has")


def test_the_item_is_one_of_the_list_that_replaces_another(here, capsys):
    config = BASE | {"model": BASE["model"] | {"rewards": ["MathReward"]}}
    (here / "my.yaml").write_text(yaml.safe_dump(config))
    (here / "more.yaml").write_text(yaml.safe_dump({"model": {"rewards": ITEMS[::-1]}}))
    files = ["--config", "my.yaml", "--config", "more.yaml"]
    assert main(["fit", *files, "--model.rewards.0.weight", "0.3"]) == 2
    said = "an argument sets only the last item of a list, here MathReward. Set weight of FormatRew"
    assert capsys.readouterr().err.startswith(f"error: model.rewards.0.weight: {said}")
