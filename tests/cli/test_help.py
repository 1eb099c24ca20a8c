"""The help of commands: the keys that people set on a screen, and all keys by their sections."""

from __future__ import annotations

import pytest
import yaml
from cli_base import BASE

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.keys import main_keys


@pytest.mark.parametrize("command", ["fit", "sft"])
def test_the_help_of_a_command_fits_a_screen_and_has_its_keys(command, capsys):
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 50
    shown = {words[0]: words[1] for line in lines if len(words := line.split()) > 1}
    keys = main_keys(command)
    assert {key: shown.get(key) for key in keys} == {key: keys[key][0] for key in keys}
    assert {
        *("model.policy.path", "model.policy.lora", "model.sampling.max_tokens"),
        *("model.optimizer.lr", "data.train", "data.validation", "trainer.max_steps"),
        *(("model.rewards", "model.group_size", "model.engine") if command == "fit" else ()),
    } <= keys.keys()


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


@pytest.mark.parametrize("written", ["--{}={}", "--{} {}"])
@pytest.mark.parametrize(
    ("key", "chosen", "of_class"),
    [
        ("model.engine", "VLLMServerEngine", "--model.engine.urls"),
        ("model.optimizer", "MasterAdamW", "--model.optimizer.fused"),
        ("trainer.callbacks", "[EarlyStopping]", "--trainer.callbacks.patience"),
        ("trainer.logger", "CSVLogger", "--trainer.logger.flush_logs_every_n_steps"),
        ("model.rewards", "[{class_path: MathReward}]", "--model.rewards.timeout_seconds"),
    ],
)
def test_all_keys_have_those_of_classes_that_arguments_choose(
    here, capsys, key, chosen, of_class, written
):
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    option = written.replace(" ", "\n").format(key, chosen).split("\n")
    assert main(["fit", "--config=base.yaml", *option, "--help=all"]) == 0
    assert of_class in capsys.readouterr().out


def test_a_narrow_terminal_wraps_words_and_cuts_none(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["fit", "--help"]) == 0
    assert "…" not in capsys.readouterr().out
