"""From arguments and config files to a trainer, a model and data, without running them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from cli_base import BASE

from lit_grpo.cli.command_line import CommandLine
from lit_grpo.cli.parsing.invocation import read_invocation
from lit_grpo.runs.files.completions import CompletionsFile
from lit_grpo.runs.files.metrics import MetricsFile
from lit_grpo.runs.final_model import FinalModel
from lit_grpo.training import MasterAdamW

MINE = """
from lightning.pytorch import Callback
from lit_grpo.training.grpo import GRPOModule

class Wider(GRPOModule):
    def __init__(self, *args, extra: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.extra = extra

class Plain(Callback):
    pass
"""


@pytest.fixture(autouse=True)
def here(here, add_module) -> Path:
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    add_module("mine_parsed", MINE)
    return here


def command_line(*arguments: str) -> CommandLine:
    invocation = read_invocation(["--config=base.yaml", "--run_dir=run", *arguments])
    return CommandLine("fit", invocation, "run")


def test_later_files_override_earlier_ones_and_arguments_override_files(here, printed_config):
    (here / "more.yaml").write_text("model: {group_size: 4, seed: 4}\ntrainer: {max_steps: 4}")
    files = ["--config=base.yaml", "--config=more.yaml"]
    config = printed_config("--model.group_size=8", *files)
    assert config["model"]["group_size"] == 8
    assert config["model"]["seed"] == 4
    assert config["trainer"]["max_steps"] == 4
    assert config["model"]["sampling"]["max_tokens"] == 3


FORMAT = "{class_path: FormatReward, init_args: {pattern: x, weight: 3, name: mine}}"
JUDGE = "{class_path: JudgeReward, init_args: {judge: {model: a, auth: none, price: {prompt: 1}}}}"
BEST = "{class_path: ModelCheckpoint, init_args: {monitor: val/accuracy, dirpath: a}}"
LISTS = {
    "the same class": (
        "model.rewards",
        FORMAT,
        "{class_path: FormatReward, init_args: {pattern: y}}",
    ),
    "a bare name": ("model.rewards", FORMAT, "MathReward"),
    "another class after a bare name": (
        "model.rewards",
        "MathReward",
        "{class_path: FormatReward, init_args: {pattern: y}}",
    ),
    "a nested object": (
        "model.rewards",
        JUDGE,
        "{class_path: JudgeReward, init_args: {judge: {model: b}}}",
    ),
    "callbacks": (
        "trainer.callbacks",
        BEST,
        "{class_path: ModelCheckpoint, init_args: {dirpath: b}}",
    ),
}


@pytest.mark.parametrize(("key", "first", "second"), LISTS.values(), ids=LISTS)
@pytest.mark.parametrize(
    "source",
    [
        "file",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("argument", "argument with =")),
    ],
)
def test_a_list_replaces_the_earlier_one_and_keeps_nothing_of_it(
    here, printed_config, key, first, second, source
):
    part, name = key.split(".")
    model = {name: value for name, value in BASE["model"].items() if name != "rewards"}
    (here / "plain.yaml").write_text(yaml.safe_dump(BASE | {"model": model}))
    (here / "first.yaml").write_text(f"{part}: {{{name}: [{first}]}}")
    (here / "second.yaml").write_text(f"{part}: {{{name}: [{second}]}}")
    arguments = {
        "file": ["--config=second.yaml"],
        "argument": [f"--{key}", f"[{second}]"],
        "argument with =": [f"--{key}=[{second}]"],
    }
    files = ["--config=plain.yaml", "--config=first.yaml"]
    replaced = printed_config(*files, *arguments[source])[part][name]
    alone = printed_config("--config=plain.yaml", "--config=second.yaml")[part][name]
    assert replaced == alone


def test_a_list_can_be_appended_to_and_its_last_object_set_by_arguments(here, printed_config):
    (here / "first.yaml").write_text(f"model: {{rewards: [{FORMAT}]}}")
    more = ["--model.rewards+=[MathReward]", "--model.rewards.weight=0.5"]
    config = printed_config("--config=base.yaml", "--config=first.yaml", *more)
    weights = [reward["init_args"]["weight"] for reward in config["model"]["rewards"]]
    assert weights == [3.0, 0.5]


def test_interpolation_sees_later_files_and_arguments_at_any_depth(here, printed_config):
    (here / "first.yaml").write_text(
        "trainer:\n"
        "  callbacks:\n"
        "  - {class_path: ModelCheckpoint, init_args: {dirpath: '${run_dir}/best'}}\n"
        "model: {warmup_steps: '${trainer.max_steps}'}\n"
    )
    (here / "second.yaml").write_text("run_dir: elsewhere")
    files = [f"--config={name}.yaml" for name in ("base", "first", "second")]
    config = printed_config(*files, "--trainer.max_steps=9")
    assert config["trainer"]["callbacks"][0]["init_args"]["dirpath"] == "elsewhere/best"
    assert config["model"]["warmup_steps"] == 9


def test_callbacks_are_appended_from_files_and_arguments(here, printed_config):
    (here / "more.yaml").write_text("trainer: {callbacks+: [{class_path: mine_parsed.Plain}]}")
    (here / "first.yaml").write_text("trainer: {callbacks: [LearningRateMonitor]}")
    files = [f"--config={name}.yaml" for name in ("base", "first", "more")]
    appended = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=reward/mean"]
    callbacks = printed_config(*files, *appended)["trainer"]["callbacks"]
    names = [callback["class_path"].rsplit(".", 1)[-1] for callback in callbacks]
    assert names == ["LearningRateMonitor", "Plain", "EarlyStopping"]
    assert callbacks[2]["init_args"]["monitor"] == "reward/mean"


def test_a_user_s_module_takes_the_keys_of_the_built_in_one_and_its_own():
    cli = command_line("--model.class_path=mine_parsed.Wider", "--model.extra=7")
    assert (cli.model.extra, cli.model.group_size) == (7, 2)


def test_the_hyper_parameters_in_a_checkpoint_never_override_the_config():
    torch.save({"hyper_parameters": {"group_size": 16}}, "other.ckpt")
    assert command_line("--ckpt_path=other.ckpt").model.group_size == 2


@pytest.mark.parametrize("logger", ["null", "false", "true"])
def test_metrics_are_written_whatever_logger_is_set(logger):
    loggers = command_line(f"--trainer.logger={logger}").trainer.loggers
    assert [type(logger) for logger in loggers] == [MetricsFile]


def test_a_user_s_loggers_and_callbacks_are_added_to_the_built_in_ones():
    cli = command_line(
        "--trainer.logger={class_path: CSVLogger, init_args: {save_dir: other}}",
        "--trainer.callbacks=mine_parsed.Plain",
    )
    assert [type(logger).__name__ for logger in cli.trainer.loggers] == ["MetricsFile", "CSVLogger"]
    names = {type(callback).__name__ for callback in cli.trainer.callbacks}
    assert {"Plain", CompletionsFile.__name__, FinalModel.__name__} <= names


def test_an_optimizer_with_masters_is_named_like_those_of_torch(here):
    (here / "more.yaml").write_text("model: {optimizer: MasterAdamW, policy: {dtype: bfloat16}}")
    arguments = ["--config=more.yaml", "--model.optimizer.lr=2e-6"]
    module = command_line(*arguments).model
    optimizer = module.make_optimizer([torch.nn.Parameter(torch.ones(1))])
    assert type(optimizer) is MasterAdamW
    assert optimizer.param_groups[0]["lr"] == 2e-6
