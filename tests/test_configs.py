"""Every bundled config is parsed and instantiated, without network or GPU."""

import math
import re
import socket
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import pytest
import yaml
from torch import zeros
from torch.nn import Parameter

from lit_grpo.__main__ import main
from lit_grpo.cli.app import import_plugins
from lit_grpo.cli.command_line import CommandLine
from lit_grpo.cli.parsing.invocation import read_invocation
from lit_grpo.objective import (
    AdvantageConfig,
    CovarianceTerm,
    DistillationTerm,
    EntropyTerm,
    KLTerm,
    Objective,
    SamplerCorrection,
)
from lit_grpo.rollout import HFEngine, RolloutEngine, VLLMServerEngine
from lit_grpo.training import GRPOModule, SFTModule

CONFIGS = files("lit_grpo.configs")
EXPERIMENTS = sorted(path.name for path in CONFIGS.iterdir() if path.name.endswith(".yaml"))
GRPO_EXPERIMENTS = [name for name in EXPERIMENTS if not name.endswith("sft.yaml")]
REWARDS = sorted(path.name for path in (CONFIGS / "rewards").iterdir())
ENGINES = sorted(path.name for path in (CONFIGS / "engines").iterdir())
STRATEGIES = sorted(path.name for path in (CONFIGS / "strategies").iterdir())
PRESETS = sorted(path.name for path in (CONFIGS / "presets").iterdir())


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    def refuse(*args):
        raise AssertionError("a config must be parsed without network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    import_plugins()


@cache
def instantiate(*names: str, arguments: tuple[str, ...] = ()) -> CommandLine:
    """Merge configs and create their objects. Tests share them and change none."""
    verb = "sft" if names[0].endswith("sft.yaml") else "fit"
    configs = [word for name in names for word in ("--config", name)]
    return CommandLine(verb, read_invocation([*configs, *arguments]), "runs/test/0")


def test_there_are_configs_for_the_quickstart_debugging_and_gsm8k():
    assert {"quickstart.yaml", "quickstart_sft.yaml", "debug.yaml", "gsm8k.yaml"} <= {*EXPERIMENTS}
    assert {"grpo.yaml", "dapo.yaml", "dr_grpo.yaml"} <= {*PRESETS}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_bundled_experiment_is_instantiated(name):
    command = instantiate(name)
    assert type(command.model) is (SFTModule if name.endswith("sft.yaml") else GRPOModule)
    assert command.datamodule.seed == command.model.seed == 0
    assert command.trainer.max_steps > 0
    names = {type(callback).__name__ for callback in command.trainer.callbacks}
    assert {"Checkpoints", "RolloutProgressBar", "CompletionsFile", "FinalModel"} <= names
    if name != "quickstart_sft.yaml":
        assert {"TimingLog", "ZeroRewardBreaker", "HealthMonitor"} <= names


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_learning_rate_can_be_set_alone(name):
    command = instantiate(name, arguments=("--model.optimizer.lr=0.125",))
    (group,) = command.model.make_optimizer([Parameter(zeros(1))]).param_groups
    assert group["lr"] == 0.125


@pytest.mark.parametrize("command", ["fit", "sft"])
def test_the_learning_rate_of_the_default_optimizer_can_be_set_alone(command, tmp_path, capsys):
    model = {"policy": {"path": "some/model"}}
    model |= {"rewards": ["MathReward"]} if command == "fit" else {}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({"model": model, "data": "AdditionData"}))
    config = ["--config", str(tmp_path / "my.yaml"), "--model.optimizer.lr=0.125"]
    with pytest.raises(SystemExit, match="^0$"):
        main([command, *config, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)["model"]["optimizer"]
    assert printed["class_path"].endswith("AdamW")
    assert printed["init_args"]["lr"] == 0.125
    assert printed["init_args"]["weight_decay"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", REWARDS)
def test_rewards_can_be_merged_into_every_experiment(name):
    for experiment in GRPO_EXPERIMENTS:
        plain, command = instantiate(experiment), instantiate(experiment, f"rewards/{name}")
        assert type(command.datamodule) is type(plain.datamodule)
        assert [reward.name for reward in command.model.rewards.rewards] == [name.split(".")[0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_engines_can_be_merged_into_every_experiment_and_change_nothing_else(name):
    for experiment in GRPO_EXPERIMENTS:
        plain, command = instantiate(experiment), instantiate(experiment, f"engines/{name}")
        assert isinstance(command.model.engine, RolloutEngine)
        assert not isinstance(command.model.engine, HFEngine)
        configs = [one.config.as_dict()["model"] for one in (plain, command)]
        assert configs[0] | {"engine": None} == configs[1] | {"engine": None}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_change_no_experiment_that_is_named_after_them(name):
    plain, command = instantiate("gsm8k.yaml"), instantiate(f"strategies/{name}", "gsm8k.yaml")
    trainers = [one.config.as_dict()["trainer"] for one in (plain, command)]
    assert trainers[0]["strategy"] == "auto"
    assert trainers[0] | {"strategy": None} == trainers[1] | {"strategy": None}
    assert type(command.trainer.strategy).__name__.lower().startswith(name.split(".")[0])


def test_the_production_config_trains_an_adapter_with_a_server_and_a_judge():
    command = instantiate("rubric_8b.yaml")
    assert command.trainer.max_steps == 2000
    assert command.model.policy.lora.rank == 64
    assert command.model.policy.path == "runs/rubric_8b_sft/0/final"
    assert isinstance(command.model.engine, VLLMServerEngine)
    assert [reward.name for reward in command.model.rewards.rewards] == ["rubric_alignment"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_seed_everything_sets_all_seeds(name):
    command = instantiate(name, arguments=("--seed_everything", "7"))
    assert command.datamodule.seed == command.model.seed == 7


@dataclass(frozen=True)
class Method:
    """The settings of a paper; everything else is this trainer's default."""

    objective: Objective
    advantage: AdvantageConfig = AdvantageConfig()
    dynamic_sampling_rounds: int = 0
    arguments: tuple[str, ...] = ()
    """What the preset leaves to the user."""


PER_SEQUENCE = SamplerCorrection(level="geometric")
METHODS = {
    "grpo": Method(Objective(aggregation="sequence", kl=KLTerm(estimator="k3", coef=0.04))),
    "dapo": Method(Objective(clip_high=0.28, overlong_filtering=True), dynamic_sampling_rounds=10),
    "dr_grpo": Method(Objective(aggregation="constant"), AdvantageConfig(deviation="none")),
    "rloo": Method(
        Objective(aggregation="sequence_sum", kl=KLTerm(estimator="k1", coef=0.03, place="reward")),
        AdvantageConfig(baseline="leave_one_out", deviation="none"),
    ),
    "reinforce_plus_plus": Method(
        Objective(aggregation="sequence", kl=KLTerm(estimator="k1", coef=0.01, place="reward")),
        AdvantageConfig(
            baseline="batch", deviation="batch", batch_statistics="tokens", discount=1.0
        ),
    ),
    "reinforce_plus_plus_baseline": Method(
        Objective(aggregation="sequence", kl=KLTerm(estimator="k2", coef=0.001)),
        AdvantageConfig(
            baseline="group", deviation="none", batch_statistics="tokens", rescale=True
        ),
    ),
    "gspo": Method(
        Objective(
            ratio="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation="sequence",
            sampler_correction=PER_SEQUENCE,
        )
    ),
    "gmpo": Method(
        Objective(
            surrogate="gmpo",
            clip_low=0.4,
            clip_high=0.4,
            aggregation="sequence",
            sampler_correction=PER_SEQUENCE,
        )
    ),
    "cispo": Method(Objective(surrogate="cispo", clip_high=4.0), dynamic_sampling_rounds=10),
    "sapo": Method(
        Objective(surrogate="sapo", sapo_temperatures=(1.0, 1.05), aggregation="sequence")
    ),
    "luspo": Method(
        Objective(
            ratio="sequence",
            clip_low=2e-3,
            clip_high=2.5e-3,
            aggregation="sequence_sum",
            sampler_correction=PER_SEQUENCE,
        )
    ),
    "vespo": Method(
        Objective(
            surrogate="vespo",
            vespo_positive=(2.0, 3.0),
            vespo_negative=(3.0, 2.0),
            aggregation="sequence_sum",
            sampler_correction=SamplerCorrection(level="token", max_ratio=None),
        ),
        AdvantageConfig(deviation="none"),
    ),
    "gdpo": Method(
        Objective(aggregation="sequence"),
        AdvantageConfig(deviation="group", combine="normalise_then_sum", rescale=True),
    ),
    "max_rl": Method(Objective(), AdvantageConfig(deviation="mean")),
    "lite_ppo": Method(Objective(), AdvantageConfig(baseline="group", deviation="batch")),
    "dual_clip": Method(Objective(ratio_cap=3.0)),
    "two_sided_clip": Method(Objective(ratio_cap=4.0, kl=KLTerm(estimator="k3", coef=0.001))),
    "top_entropy": Method(
        Objective(clip_high=0.28, overlong_filtering=True, top_entropy_fraction=0.2),
        dynamic_sampling_rounds=10,
    ),
    "skywork_or1": Method(
        Objective(entropy=EntropyTerm(coef=0.0, target=0.2, coef_step=0.005)),
    ),
    "deepseek_v3_2": Method(
        Objective(
            aggregation="sequence",
            kl=KLTerm(estimator="k3", coef=0.001, importance=True),
            off_policy_threshold=0.5,
        ),
        AdvantageConfig(deviation="none"),
    ),
    "on_policy_distillation": Method(
        Objective(surrogate="none", distillation=DistillationTerm(coef=1.0)),
        arguments=("--model.teacher.path=teacher",),
    ),
    "dppo": Method(Objective(surrogate="dppo", old_logprobs="sampler")),
    "opo": Method(Objective(), AdvantageConfig(baseline="length_weighted", deviation="none")),
    "clip_cov": Method(Objective(covariance=CovarianceTerm(fraction=2e-4, low=1.0, high=5.0))),
    "kl_cov": Method(
        Objective(
            clip_low=1.0,
            clip_high=math.inf,
            covariance=CovarianceTerm(action="kl", fraction=2e-3, coef=1.0),
        )
    ),
}


def test_every_preset_is_in_the_table():
    assert METHODS.keys() == {name.removesuffix(".yaml") for name in PRESETS}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_preset_has_the_settings_of_its_paper(name):
    arguments = METHODS[name].arguments
    command = instantiate("quickstart.yaml", f"presets/{name}.yaml", arguments=arguments)
    assert command.model.objective == METHODS[name].objective
    assert command.model.advantage == METHODS[name].advantage
    config = command.config.as_dict()["model"]
    assert config["dynamic_sampling_rounds"] == METHODS[name].dynamic_sampling_rounds


def keys(tree: dict, path: tuple = ()) -> set[tuple]:
    """Return the path to every value that is not a mapping."""
    return {
        found
        for key, value in tree.items()
        for found in (keys(value, (*path, key)) if isinstance(value, dict) else {(*path, key)})
    }


@pytest.mark.parametrize("experiment", GRPO_EXPERIMENTS)
@pytest.mark.parametrize("name", METHODS)
def test_a_preset_overrides_all_method_settings_of_an_experiment(name, experiment):
    model = yaml.safe_load((CONFIGS / experiment).read_text())["model"]
    own = {part: model[part] for part in ("objective", "advantage") if part in model}
    preset = yaml.safe_load((CONFIGS / "presets" / f"{name}.yaml").read_text())["model"]
    assert keys(own) <= keys(preset)


@pytest.mark.parametrize("name", METHODS)
def test_a_preset_sets_only_objective_advantage_and_dynamic_sampling(name):
    preset = yaml.safe_load((CONFIGS / "presets" / f"{name}.yaml").read_text())
    assert preset.keys() == {"model"}
    assert preset["model"].keys() <= {"objective", "advantage", "dynamic_sampling_rounds"}


@pytest.mark.parametrize("name", METHODS)
def test_a_preset_names_its_paper_and_shows_its_command(name):
    text = (CONFIGS / "presets" / f"{name}.yaml").read_text()
    assert re.search(r"^# .*arXiv \d{4}\.\d{5}", text)
    assert f"--config presets/{name}" in text
