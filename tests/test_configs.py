"""Every config that ships is read and all of its classes are made, without network or GPU."""

import socket
from importlib.resources import files

import pytest
import yaml

from lit_grpo.advantages import AdvantageConfig
from lit_grpo.cli import CommandLine, import_plugins
from lit_grpo.cli_configs import look_at
from lit_grpo.losses import Objective
from lit_grpo.module import GRPOModule
from lit_grpo.sft import SFTModule

CONFIGS = files("lit_grpo.configs")
EXPERIMENTS = sorted(path.name for path in CONFIGS.iterdir() if path.name.endswith(".yaml"))
PRESETS = sorted(path.name for path in (CONFIGS / "presets").iterdir())


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    def refuse(*args):
        raise AssertionError("a config must be read without network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    import_plugins()


def make(*names: str, arguments: tuple[str, ...] = ()) -> CommandLine:
    command = "sft" if names[0].endswith("sft.yaml") else "fit"
    configs = [word for name in names for word in ("--config", name)]
    return CommandLine(command, look_at([*configs, *arguments]), "runs/test/0")


def test_there_are_configs_for_the_quickstart_debugging_and_gsm8k():
    assert {"quickstart.yaml", "quickstart_sft.yaml", "debug.yaml", "gsm8k.yaml"} <= {*EXPERIMENTS}
    assert {"grpo.yaml", "dapo.yaml", "dr_grpo.yaml"} <= {*PRESETS}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_shipped_experiment_is_read_and_made(name):
    made = make(name)
    assert type(made.model) is (SFTModule if name.endswith("sft.yaml") else GRPOModule)
    assert made.datamodule.seed == made.model.seed == 0
    assert made.trainer.max_steps > 0
    names = {type(callback).__name__ for callback in made.trainer.callbacks}
    assert {"ExitCheckpoint", "RolloutProgressBar", "CompletionsFile", "FinalModel"} <= names
    if name != "quickstart_sft.yaml":
        assert {"TimingLog", "ZeroRewardBreaker", "SignalWarnings"} <= names


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_one_seed_sets_all_seeds(name):
    made = make(name, arguments=("--seed_everything", "7"))
    assert made.datamodule.seed == made.model.seed == 7


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_objective_and_leaves_the_rest(name):
    plain, preset = make("quickstart.yaml"), make("quickstart.yaml", f"presets/{name}")
    wanted = yaml.safe_load((CONFIGS / "presets" / name).read_text())["model"]
    for key, value in wanted["objective"].items():
        assert getattr(preset.model.objective, key) == value
    for key, value in wanted["advantage"].items():
        assert getattr(preset.model.advantage, key) == value
    assert preset.model.group_size == plain.model.group_size
    assert preset.trainer.max_steps == plain.trainer.max_steps


def test_the_presets_are_what_their_papers_say():
    grpo, dapo, dr_grpo = (
        make("quickstart.yaml", f"presets/{name}.yaml").model
        for name in ("grpo", "dapo", "dr_grpo")
    )
    assert grpo.objective == Objective(aggregation="sequence", kl="k3", kl_coef=0.04)
    assert dapo.objective == Objective(clip_high=0.28, overlong_filtering=True)
    assert dr_grpo.objective == Objective(aggregation="constant")
    assert grpo.advantage == dapo.advantage == AdvantageConfig(deviation="group")
    assert dr_grpo.advantage == AdvantageConfig(deviation="none")
