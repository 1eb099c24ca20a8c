"""A reward function on the command line and in files, written in every way that Python has."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cli_base import BASE

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.reward_functions import with_functions

MODULE = """
from lit_grpo.rewards import MathReward

def digits(completions, **columns):
    return [float(sum(map(str.isdigit, text))) for text in completions]

def strict() -> MathReward:
    return MathReward(weight=2.0)

class Half(MathReward):
    pass
"""


@pytest.fixture(autouse=True)
def here(here, add_module) -> Path:
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    add_module("fn_rewards", MODULE)
    return here


@pytest.mark.parametrize(
    "path",
    ["fn_rewards.digits", "fn_rewards:digits", "fn_rewards.py:digits", "./fn_rewards.py:digits"],
)
def test_the_path_of_a_function_is_a_reward(path, here, printed_config):
    (here / "mine.yaml").write_text(yaml.safe_dump({"model": {"rewards": [path]}}))
    given = {
        "file": printed_config("--config=base.yaml", "--config=mine.yaml"),
        "argument": printed_config("--config=base.yaml", "--model.rewards", f"[{path}]"),
        "appended": printed_config("--config=base.yaml", "--model.rewards+", path),
    }
    for config in given.values():
        last = config["model"]["rewards"][-1]
        assert last["class_path"].endswith(".FunctionReward")
        assert last["init_args"]["function"] == path
    assert [len(one["model"]["rewards"]) for one in given.values()] == [1, 1, 2]


@pytest.mark.parametrize("path", ["fn_rewards.digits", "fn_rewards.py:digits"])
def test_the_accuracy_takes_functions_as_well(path, here, printed_config):
    for name, accuracy in (("one", path), ("list", [path, "MathReward"])):
        evaluation = {"accuracy": accuracy, "num_samples": 2}
        (here / f"{name}.yaml").write_text(yaml.safe_dump({"model": {"evaluation": evaluation}}))
    given = [
        printed_config("--config=base.yaml", "--config=one.yaml"),
        printed_config("--config=base.yaml", "--model.evaluation.accuracy", path),
    ]
    for config in given:
        accuracy = config["model"]["evaluation"]["accuracy"]
        assert accuracy["class_path"].endswith(".FunctionReward")
        assert accuracy["init_args"]["function"] == path
    first, second = printed_config("--config=base.yaml", "--config=list.yaml")["model"][
        "evaluation"
    ]["accuracy"]
    assert first["init_args"]["function"] == path
    assert second["class_path"].endswith(".MathReward")


def test_a_function_scores_completions_and_a_saved_config_trains_again(here, capsys):
    arguments = ["--config=base.yaml", "--model.rewards=[fn_rewards.digits]"]
    assert main(["rewards", *arguments, "--n=2"]) in (0, 1)
    assert "digits" in capsys.readouterr().out
    assert main(["fit", *arguments, "--run_dir=run"]) == 0
    assert "reward/digits/mean" in (here / "run/metrics.csv").read_text()
    assert main(["fit", "--config=run/config.yaml", "--run_dir=again"]) == 0
    assert "reward/digits/mean" in (here / "again/metrics.csv").read_text()


def test_a_function_replaces_a_reward_of_a_file_with_its_settings(here, printed_config):
    settings = {"class_path": "FunctionReward", "init_args": {"function": "fn_rewards:digits"}}
    settings["init_args"]["weight"] = 0.5
    (here / "mine.yaml").write_text(yaml.safe_dump({"model": {"rewards": [settings]}}))
    files = ["--config=base.yaml", "--config=mine.yaml"]
    config = printed_config(*files, "--model.rewards=[fn_rewards.digits]")
    (reward,) = config["model"]["rewards"]
    assert reward["init_args"]["weight"] == 1.0


@pytest.mark.parametrize(
    "path", ["MathReward", "fn_rewards.Half", "fn_rewards.strict", "fn_rewards.none", "no_module.f"]
)
def test_what_is_no_reward_function_is_left_to_the_parser(path):
    assert with_functions([path]) == [path]
    assert with_functions(f"[{path}]") == f"[{path}]"
    assert with_functions(path, is_item=True) == path


def test_the_function_of_a_file_is_not_that_of_a_later_reward_without_one(here, capsys):
    model = BASE["model"] | {"rewards": ["fn_rewards.digits"]}
    (here / "mine.yaml").write_text(yaml.safe_dump(BASE | {"model": model}))
    later = "--model.rewards=[{class_path: FunctionReward, init_args: {weight: 0.5}}]"
    assert main(["fit", "--config=mine.yaml", later]) == 2
    assert "FunctionReward.function: expected" in capsys.readouterr().err


def test_a_bare_name_is_told_to_need_its_module(capsys):
    assert main(["fit", "--config=base.yaml", "--model.rewards=[digits]"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("A class or function of yours needs its path, such as my_module.digits.")


@pytest.mark.parametrize("path", ["fn_rewards.digits", "fn_rewards:digits", "fn_rewards.py:digits"])
def test_a_function_without_brackets_is_told_how_a_list_is_written(path, capsys):
    assert main(["fit", "--config=base.yaml", f"--model.rewards={path}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(f"expected list[Reward], got {path}. A list of one is '[{path}]'.")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model.rewards=[fn_rewards.py]"],
        ["--model.rewards=fn_rewards.py"],
        ["--model.rewards+=fn_rewards.py"],
        ["--config=mine.yaml"],
    ],
)
def test_a_file_without_a_function_is_told_which_functions_it_has(arguments, here, capsys):
    (here / "mine.yaml").write_text("model: {rewards: [fn_rewards.py]}")
    assert main(["fit", "--config=base.yaml", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("It has digits, strict. Write fn_rewards.py:digits.")


def test_the_file_of_a_class_is_told_to_be_named_without_its_suffix(capsys):
    assert main(["fit", "--config=base.yaml", "--model.rewards=[{class_path: fn_rewards.py}]"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(
        "fn_rewards.py cannot be imported: module 'fn_rewards' has no attribute "
        "'py'. Leave out .py: fn_rewards.NAME."
    )
