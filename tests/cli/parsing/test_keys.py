"""The keys that people set: those of the command, with the defaults that are real."""

from __future__ import annotations

import pytest
import yaml
from cli_base import BASE

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.keys import ONLY_TRAINING, main_keys

PROMPTS = {"class_path": "PromptData", "init_args": {"train": None}}
WITHOUT_DEFAULT = {"model.policy.path", "model.rewards", "model.engine", "data", "run_dir"}


@pytest.fixture(params=["fit", "sft"])
def command(request, here) -> str:
    model = BASE["model"] if request.param == "fit" else {"policy": BASE["model"]["policy"]}
    model = {key: model[key] for key in ("policy", "rewards") if key in model}
    (here / "base.yaml").write_text(yaml.safe_dump({"model": model, "data": PROMPTS}))
    return request.param


def printed(capsys, command: str, *arguments: str) -> dict:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--config=base.yaml", *arguments, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def value(config, key: str):
    for name in key.split("."):
        config = config.get("init_args", config).get(name, config.get(name))
    return config


def test_every_main_key_has_the_default_that_is_shown(command, capsys):
    config = printed(capsys, command)
    for key, (default, _) in main_keys(command).items():
        if key in WITHOUT_DEFAULT:
            continue
        expected = float(default) if "e-" in default else yaml.safe_load(default)
        assert value(config, key) == expected, key


def test_sft_has_a_target_in_place_of_rewards_and_a_learning_rate_of_its_own():
    fit, sft = main_keys("fit"), main_keys("sft")
    assert {"model.rewards", "model.group_size", "model.engine"} <= fit.keys() - sft.keys()
    assert sft.keys() - fit.keys() == {"model.target_column"}
    assert (fit["model.optimizer.lr"][0], sft["model.optimizer.lr"][0]) == ("1e-6", "2e-5")


@pytest.mark.parametrize("command", ["validate", "test", "rewards", "judge-check", "rescore"])
def test_a_command_that_does_not_train_has_no_keys_of_the_training(command):
    assert main_keys("fit").keys() - main_keys(command).keys() == ONLY_TRAINING


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_a_command_that_looks_at_a_training_has_its_keys(command):
    assert main_keys(command) == main_keys("fit")
