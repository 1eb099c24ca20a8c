"""Errors of the parser name the key that is wrong, and say what to do."""

import pytest
import yaml
from mixture_configs import config

from lit_grpo.__main__ import main


@pytest.mark.parametrize(
    ("wrong", "rule"), [({"fraction": 0}, "positive"), ({"lr_scale": -2}, ">= 0")]
)
def test_a_value_out_of_range_in_a_phase_names_the_phase_and_the_range(wrong, rule, here, capsys):
    phase = {"weights": {"first": 1}, "fraction": 1}
    mix = config()
    mix["data"]["init_args"]["curriculum"] = [phase, phase | wrong]
    (here / "mix.yaml").write_text(yaml.safe_dump(mix))
    assert main(["fit", "--config", "mix.yaml"]) == 2
    (name,) = wrong
    key = f"data.curriculum.1.{name}"
    assert capsys.readouterr().err.startswith(f"error: {key} must be {rule}, got {wrong[name]}")


def test_a_misspelt_init_args_is_told_so_wherever_it_stands(here, capsys):
    data = {"class_path": "PromptData", "init_arg": {"train": "rows.jsonl"}}
    (here / "my.yaml").write_text(yaml.safe_dump(config() | {"data": data}))
    assert main(["fit", "--config", "my.yaml"]) == 2
    line = "data.init_arg: no such key. Did you mean init_args?\n"
    assert capsys.readouterr().err == f"error: my.yaml: {line}"
    (here / "mix.yaml").write_text(yaml.safe_dump(config(data=data)))
    assert main(["fit", "--config", "mix.yaml"]) == 2
    assert capsys.readouterr().err == f"error: mix.yaml: data.init_args.sources.second.{line}"


@pytest.mark.parametrize(
    ("words", "preset"), [(["--preset", "dapo"], "NAME"), (["--preset=dapo"], "dapo")]
)
@pytest.mark.parametrize(("command", "config"), [("fit", "debug"), ("sft", "quickstart_sft")])
def test_a_preset_is_told_to_be_a_config(command, config, words, preset, capsys):
    assert main([command, "--config", config, *words]) == 2
    assert f"A preset is a config: --config presets/{preset}." in capsys.readouterr().err
