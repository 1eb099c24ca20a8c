"""The help of commands: the keys that people set are real, with their real defaults."""

from __future__ import annotations

import pytest
import yaml
from cli_base import BASE

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.keys import main_keys

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


def test_the_help_of_a_command_fits_a_screen_and_has_its_keys(command, capsys):
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 50
    assert [
        key for key in main_keys(command) if not any(line.split()[:1] == [key] for line in lines)
    ] == []


def test_all_keys_are_grouped_by_key_with_those_of_the_chosen_classes(here, capsys):
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    assert main(["fit", "--config=base.yaml", "--help=all"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: lit-grpo fit [RUN] [--config FILE ...]")
    titles = [line for line in text.splitlines() if line.endswith(":") and line[:1].isalpha()]
    assert {"trainer:", "model:", "model.sampling:", "model.objective.kl:", "data:"} <= {*titles}
    assert "DataModule standardizes" not in text
    assert "Customize every aspect" not in text
    for key in ("--model.rewards.correct", "--data.num_digits", "--model.update.minibatches"):
        assert key in text


def test_a_narrow_terminal_wraps_words_and_cuts_none(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["fit", "--help"]) == 0
    assert "…" not in capsys.readouterr().out
