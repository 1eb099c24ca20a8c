"""Mistakes in classes within a config name the place, and say what to do."""

import pytest
import yaml
from mixture_configs import DATA, config

from lit_grpo.__main__ import main


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"wieght": 0.7}, "wieght: no such key. Did you mean weight?"),
        ({"weight": "much"}, "weight: expected float, got much."),
        ({"train": "x"}, "train: no such key. Set data.sources.second.data.train.\n"),
        ({"adaptive": {"sucess": 1.0}}, "adaptive: Adaptive.sucess: no such key. Did you mean su"),
        (
            {"data": {"class_path": "PromptData", "init_args": {"tran": "x"}}},
            "data: PromptData.tran: no such key. Did you mean train?",
        ),
        (
            {"data": DATA | {"class_path": "PromtData"}},
            "data: no class is called PromtData. Did you mean PromptData?",
        ),
    ],
)
def test_a_mistake_in_a_source_names_the_source_and_the_nearest_key(wrong, message, here, capsys):
    (here / "mix.yaml").write_text(yaml.safe_dump(config(**wrong), sort_keys=False))
    assert main(["fit", "--config", "mix.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"error: data.sources.second.{message}")


def test_a_mistyped_source_on_the_command_line_is_named(here, capsys):
    (here / "mix.yaml").write_text(yaml.safe_dump(config()))
    assert main(["fit", "--config", "mix.yaml", "--data.sources.secnd.weight", "2"]) == 2
    error = "error: data.sources.secnd.data: required, but not set. Did you mean second?\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("name", ["chat", "template", "train"])
def test_a_key_of_the_data_is_one_of_each_source_in_a_mixture(name, here, capsys):
    (here / "mix.yaml").write_text(yaml.safe_dump(config(), sort_keys=False))
    assert main(["fit", "--config", "mix.yaml", f"--data.{name}", "x"]) == 2
    error = f"error: data: MixtureData.{name}: no such key. Each source has its own: set "
    assert capsys.readouterr().err == f"{error}data.sources.NAME.data.{name}.\n"


OWN_REWARDS = """
from lit_grpo.rewards import Reward

class Bare(Reward):
    def __init__(self, factor: float = 1.0):
        super().__init__()

    def score(self, prompt, completion):
        return 1.0

class Kept(Bare):
    def __init__(self, factor: float = 1.0, **settings):
        super().__init__(factor)
"""


@pytest.mark.parametrize(
    ("reward", "setting", "has_hint"),
    [
        ("Bare", "weight", True),
        ("Kept", "on_error", True),
        ("Bare", "factr", False),
        ("Bare", "nothing", False),
    ],
)
def test_an_own_reward_without_the_settings_of_every_reward_is_told_to_pass_them_on(
    reward, setting, has_hint, here, add_module, capsys
):
    add_module("bare_rewards", OWN_REWARDS)
    given = {"class_path": f"bare_rewards.{reward}", "init_args": {setting: 2}}
    model = config()["model"] | {"rewards": [given]}
    (here / "my.yaml").write_text(yaml.safe_dump(config() | {"model": model}))
    assert main(["fit", "--config", "my.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: model.rewards: {reward}.{setting}: no such key.")
    needed = "def __init__(self, ..., **settings): super().__init__(**settings).\n"
    assert error.endswith(needed) == has_hint
