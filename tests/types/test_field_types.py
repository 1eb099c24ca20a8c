"""Settings that Python does not check, and the command line does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import Parameter, isclass, signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import lit_grpo
from lit_grpo.callbacks import Alerts, Checkpoints, HealthMonitor, Rule, StallWatchdog, TimingLog
from lit_grpo.data import AdditionData, MixtureData, MixtureSource, Phase, PromptData
from lit_grpo.judge import Judge
from lit_grpo.objective import (
    AdvantageConfig,
    CovarianceTerm,
    KLTerm,
    Objective,
    SamplerCorrection,
    SamplerMask,
)
from lit_grpo.policy import LoRA, Policy
from lit_grpo.rewards import FormatReward, JudgeReward, MathReward, RankingReward, ScorerReward
from lit_grpo.rollout import Sampling, SGLangEngine, VLLMEngine, VLLMServerEngine
from lit_grpo.training import GRPOModule, UpdateConfig
from lit_grpo.types import UserError
from lit_grpo.types.field_types import check_fields, check_value


@dataclass
class Inner:
    number: int = 1


@dataclass
class Section:
    choice: Literal["a", "b"] | Callable[..., float] = "a"
    texts: tuple[str, ...] = ()
    number: int | None = None
    share: float = 0.5
    is_on: bool = False
    path: str | None = None
    inner: Inner = Inner
    others: Sequence[Inner] | None = None
    columns: Mapping[str, Any] | None = None
    named: dict[str, Inner] = field(default_factory=dict)
    anything: Any = None


GOOD = {
    "choice": ["b", max],
    "texts": [["x"], ("x", "y"), []],
    "number": [3, None],
    "share": [1, 0.5],
    "is_on": [True],
    "path": [Path("x"), "x", None],
    "inner": [Inner()],
    "others": [[Inner()], (), None],
    "columns": [{}, os.environ, None],
    "named": [{}, {"a": Inner()}],
    "anything": [3, "x"],
}
BAD = {
    "choice": [("c", "a, b or a function, got 'c'"), (1, "a, b or a function")],
    "texts": [("xy", "a list of strings, got 'xy'"), ([1], r"a list of strings, got \[1\]")],
    "number": [(3.0, "an integer or None, got 3.0"), (True, "an integer or None")],
    "share": [("0.5", "a number, got '0.5'"), (True, "a number, got True")],
    "is_on": [("no", "True or False, got 'no'")],
    "path": [(3, "a string or None, got 3")],
    "inner": [(0.1, "of type Inner, got 0.1")],
    "others": [([1], "a list of Inner or None"), (Inner(), "a list of Inner or None")],
    "columns": [([], "a dict or None")],
    "named": [({"a": {"number": 1}}, "a dict of Inner, got")],
}


@pytest.mark.parametrize(("name", "value"), [(k, one) for k in GOOD for one in GOOD[k]])
def test_a_value_of_its_type_passes(name, value):
    check_fields("model.section", Section(**{"inner": Inner(), name: value}))


@pytest.mark.parametrize(("name", "value", "said"), [(k, *one) for k in BAD for one in BAD[k]])
def test_a_value_of_another_type_is_told_what_is_expected(name, value, said):
    with pytest.raises(UserError, match=rf"^section\.{name} must be {said}.* Set model\.section"):
        check_fields("model.section", Section(**{"inner": Inner(), name: value}))


def test_the_path_of_a_function_is_for_configs():
    with pytest.raises(UserError, match="in Python pass the function itself, which a config"):
        Objective(surrogate="my_objective.soft_clip")
    with pytest.raises(UserError, match="in Python pass the function itself, which a config"):
        AdvantageConfig(function="my_objective.signs")


def test_a_single_setting_is_checked_too():
    check_value("model.group_size", 4, int)
    with pytest.raises(UserError, match=r"group_size must be an integer, got 4\.0"):
        check_value("model.group_size", 4.0, int)


JUDGE = Judge(model="m", base_url="http://127.0.0.1:1/v1", auth="none")


def module(**settings):
    policy = {"architecture": {"model_type": "llama"}}
    return GRPOModule(Policy(**policy), [FormatReward(".*")], **settings)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AdvantageConfig(combine="sum_then_normalize"), "sum_then_normalise or normalise_"),
        (lambda: AdvantageConfig(batch_statistics="token"), "rows or tokens, got 'token'"),
        (lambda: KLTerm(coef=1, place="losss"), "loss or reward, got 'losss'"),
        (lambda: KLTerm(coef=1, estimator="k4"), "k1, k2 or k3, got 'k4'"),
        (lambda: KLTerm(coef=1, gradient="k1"), "estimator or k2, got 'k1'"),
        (lambda: Objective(surrogate="clipp"), "none or a function, got 'clipp'"),
        (lambda: Objective(old_logprobs="samplers"), "policy or sampler"),
        (lambda: Objective(kl=0.1), "of type KLTerm, got 0.1"),
        (lambda: Objective(sampler_masks=SamplerMask(max=2.0)), "a list of SamplerMask"),
        (lambda: SamplerCorrection(level="tokens"), "geometric or a function, got 'tokens'"),
        (lambda: SamplerMask(max=2.0, statistic="k1"), "ratio, k2 or k3"),
        (lambda: CovarianceTerm(action="klip"), "clip or kl"),
        (lambda: Sampling(stop="</answer>"), "a list of strings, got '</answer>'"),
        (lambda: UpdateConfig(epochs=2.0), "an integer, got 2.0"),
        (lambda: LoRA(target_modules=3), "a list of strings or a string, got 3"),
        (lambda: Policy("x", lora=16), "of type LoRA or None, got 16"),
        (lambda: Policy("x", dtype="fp16"), "float32 or bfloat16, got 'fp16'"),
        (lambda: Policy("x", dtype=torch.bfloat16), r"torch\.bfloat16 \(write 'bfloat16'\)"),
        (lambda: Policy("x", lora=LoRA), r"got the class LoRA \(write LoRA\(\.\.\.\)\)"),
        (lambda: Checkpoints(mode="maximum"), "max or min, got 'maximum'"),
        (lambda: StallWatchdog(action="halt"), "warn or stop"),
        (lambda: module(group_size=4.0), "an integer, got 4.0"),
        (lambda: module(lr_schedule="cosin"), "constant, linear or cosine"),
        (lambda: AdditionData(2, prompts_per_step="4"), "an integer"),
        (lambda: PromptData("x.jsonl", too_long="truncate"), "drop or refuse"),
        (lambda: ScorerReward("x", activation="tanh"), "none, sigmoid, softmax or None"),
        (lambda: RankingReward(JUDGE, kind="pairs"), "listwise or pairwise"),
        (lambda: SGLangEngine(weight_sync="adapters"), "auto, full or adapter"),
        (lambda: VLLMServerEngine(weight_transfer="ram"), "disk or nccl"),
        (lambda: VLLMEngine(dtype="half"), "float32, bfloat16, float16 or None"),
        (lambda: JudgeReward("gpt-5-mini"), "of type Judge, got 'gpt-5-mini'"),
        (lambda: RankingReward({"model": "m"}), "of type Judge, got {'model': 'm'}"),
        (lambda: MathReward(correct="yes"), "a number, got 'yes'"),
        (lambda: HealthMonitor(rules={"truncated": {"patience": 20}}), "a dict of Rule or None"),
        (
            lambda: Rule(action="rollback"),
            r"roll_back, stop or None, got 'rollback' \(did you mean",
        ),
        (lambda: Rule(patience="3"), "an integer or None, got '3'"),
        (lambda: Alerts(kinds=["started"]), r"a list of start, .* or done, got \['started'\]"),
        (lambda: Alerts(command=5), "a string, a list of strings or None, got 5"),
        (
            lambda: GRPOModule("x", len),
            r"list or tuple, .* \(write \[\.\.\.\] around",
        ),
        (lambda: TimingLog(stages="yes"), "True or False, got 'yes'"),
        (lambda: Policy("any", lora={"rank": 4}), r"write LoRA\(rank=4\), of lit_grpo.policy"),
        (lambda: VLLMServerEngine(urls="http://127.0.0.1:1"), "a list of strings or None"),
    ],
)
def test_a_mistake_in_python_is_one_line_as_on_the_command_line(make, said):
    with pytest.raises(UserError, match=f"must be .*{said}.*Set "):
        make()


NOT_SETTINGS = {"Event", "Reward"}
"""What the trainer makes itself, and a base class whose settings a module checks."""
REQUIRED = {
    "judge": JUDGE,
    "model": "m",
    "path": "x",
    "pattern": ".*",
    "train": "x.jsonl",
}


def choices() -> list[tuple[type, str]]:
    """Return the arguments of all exported classes that are one of several texts."""
    found = []
    for name in ("callbacks", "data", "judge", "objective", "policy", "rewards", "rollout"):
        package = import_module(f"lit_grpo.{name}")
        kinds = [getattr(package, one) for one in package.__all__ if one not in NOT_SETTINGS]
        for kind in filter(isclass, kinds):
            for argument, hint in get_type_hints(kind.__init__).items():
                options = [hint, *get_args(hint)]
                literals = (one for one in options if get_origin(one) is Literal)
                if any(isinstance(get_args(one)[0], str) for one in literals):
                    found.append((kind, argument))
    return found


@pytest.mark.parametrize(("kind", "name"), choices(), ids=lambda one: getattr(one, "__name__", one))
def test_no_class_takes_a_choice_that_there_is_not(kind, name):
    given = {name: "bogus"}
    for one in signature(kind).parameters.values():
        if one.default is Parameter.empty and one.kind is not Parameter.VAR_KEYWORD:
            given.setdefault(one.name, REQUIRED.get(one.name))
    with pytest.raises(UserError, match=rf"\b{name} must be .*, got .*'bogus'"):
        kind(**given)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"adaptive": {"success": 1.0}},
            r"adaptive must be of type Adaptive or None, got .* \(write Ada",
        ),
        ({"adaptive": True}, "adaptive must be of type Adaptive or None, got True"),
        ({"weight": "0.5"}, "weight must be a number, got '0.5'"),
    ],
)
def test_the_settings_of_a_source_are_checked_by_the_mixture(settings, said):
    source = MixtureSource(**({"data": PromptData("x.jsonl")} | settings))
    with pytest.raises(UserError, match=rf"sources\.a\.{said}"):
        MixtureData({"a": source})


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ({"weights": {"a": 1.0}, "fraction": 1.0}, "curriculum.0 must be of type Phase, got"),
        (Phase(weights={"a": 1.0}, fraction="1"), "fraction must be a number, got '1'"),
    ],
)
def test_the_phases_of_a_curriculum_are_objects_with_numbers(phase, said):
    with pytest.raises(UserError, match=said):
        MixtureData({"a": MixtureSource(data=PromptData("x.jsonl"))}, curriculum=[phase])


def test_a_path_may_be_one_of_pathlib():
    assert lit_grpo.Policy(Path("runs/final")).path == "runs/final"
