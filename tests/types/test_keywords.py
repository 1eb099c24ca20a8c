"""Keywords that a constructor does not have, and what is named in their place."""

import re
from dataclasses import is_dataclass
from functools import partial
from inspect import signature

import pytest

import lit_grpo.callbacks
import lit_grpo.data
import lit_grpo.judge
import lit_grpo.objective
import lit_grpo.rollout
from lit_grpo import GRPOModule, SFTModule
from lit_grpo.types import UserError
from lit_grpo.types.keywords import NAMES, _in_program

ADAMW = "Set optimizer, such as functools.partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.0)."


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("model", "Set policy of GRPOModule."),
        ("reward_funcs", "Set rewards of GRPOModule."),
        ("num_generations", "Set group_size of GRPOModule."),
        ("max_completion_length", "Set sampling.max_tokens of GRPOModule."),
        ("temperature", "Set sampling.temperature of GRPOModule."),
        ("beta", "Set objective.kl.coef of GRPOModule."),
        ("epsilon", "Set objective.clip_low and clip_high of GRPOModule."),
        ("loss_type", "Set objective.aggregation (or objective.surrogate) of GRPOModule."),
        ("lr", ADAMW),
        ("learning_rate", ADAMW),
        ("adam_beta1", ADAMW),
        ("warmup_ratio", "Set warmup_steps (a number of optimizer steps) of GRPOModule."),
        ("train_dataset", "Set train of PromptData."),
        ("num_train_epochs", "Set max_epochs of Trainer."),
        ("output_dir", "Set run_dir of Trainer."),
        ("reward", "Did you mean rewards?"),
        (
            "reward_weights",
            "Set weight of Reward objects: MathReward(weight=0.5) or "
            "FunctionReward(my_function, weight=0.5).",
        ),
        ("args", "Set its values as arguments of GRPOModule, PromptData and Trainer."),
        ("save_steps", "Set every_n_steps of Checkpoints, among the callbacks of Trainer."),
        ("use_vllm", "Set engine of GRPOModule, such as VLLMEngine() of lit_grpo.rollout."),
        ("use_liger", "For settings of other trainers see docs/guides/migrate.md."),
    ],
)
def test_an_unknown_keyword_of_a_module_is_told_what_to_set(name, instead):
    message = f"{name}: GRPOModule has no such setting. {instead}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        GRPOModule("model", [], **{name: 1})


def test_a_warm_up_refuses_them_too():
    with pytest.raises(
        UserError, match=r"^max_tokens: SFT.* Set sampling\.max_tokens of SFTModule"
    ):
        SFTModule("model", max_tokens=8)
    for name, instead in (
        ("model", "policy of SFTModule"),
        ("max_completion_length", "sampling.max_tokens of SFTModule"),
    ):
        with pytest.raises(UserError, match=rf"Set {instead}\.$"):
            SFTModule("model", **{name: 1})
    for name in ("rewards", "num_generations", "beta"):
        with pytest.raises(UserError, match=f"^{name}: .* sampled and scored by GRPOModule; SFTM"):
            SFTModule("model", **{name: 1})


def test_every_name_of_other_libraries_has_a_place_in_a_program():
    places = [_in_program(key, "Trainer", []) for key in NAMES.values()]
    assert all(re.search(" of [A-Z]|functools", place) for place in places)


@pytest.mark.parametrize(
    ("made", "keyword", "instead"),
    [
        (lit_grpo.Sampling, "max_completion_length", "Set max_tokens of Sampling."),
        (lit_grpo.KLTerm, "beta", "Set coef of KLTerm."),
        (lit_grpo.Objective, "beta", "Set kl.coef of Objective."),
        (lit_grpo.Objective, "epsilon", "Set clip_low and clip_high of Objective."),
        (lit_grpo.LoRA, "r", "Set rank of LoRA."),
        (lit_grpo.LoRA, "lora_alpha", "Set alpha of LoRA."),
        (lit_grpo.Policy, "peft_config", "Set lora of Policy."),
        (
            lit_grpo.Policy,
            "model",
            "Set path to the directory into which save_pretrained of the model has written it.",
        ),
        (lit_grpo.UpdateConfig, "num_iterations", "Set epochs of UpdateConfig."),
        (lit_grpo.PromptData, "train_dataset", "Set train of PromptData."),
        (lit_grpo.PromptData, "num_generations", "Set group_size of GRPOModule."),
        (lit_grpo.MathReward, "wieght", "Did you mean weight?"),
        (lit_grpo.judge.Judge, "azure_endpoint", "Set base_url of Judge."),
        (lit_grpo.rollout.VLLMServerEngine, "api_key", "Did you mean api_key_variable?"),
        (lit_grpo.callbacks.Checkpoints, "every_n_step", "Did you mean every_n_steps?"),
    ],
)
def test_the_parts_of_a_module_refuse_them_too(made, keyword, instead):
    message = f"{keyword}: {made.__name__} has no such setting. {instead}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        made(**{keyword: 1})


CLASSES = {*lit_grpo.__all__} - {"export_checkpoint", "EngineFailed", "UserError"}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_class_for_programs_refuses_an_unknown_keyword_in_words(name):
    made = getattr(lit_grpo, name)
    needed = [
        "math.fabs"
        for one in signature(made).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    with pytest.raises(UserError, match=f"^no_such_setting: {name} has no such setting"):
        made(*needed, no_such_setting=1)


@pytest.mark.parametrize(
    "made",
    [
        one
        for package in (lit_grpo.objective, lit_grpo.judge, lit_grpo.rollout, lit_grpo.data)
        for one in (getattr(package, name) for name in package.__all__)
        if is_dataclass(one) and one not in (lit_grpo.objective.LossInputs, lit_grpo.data.Row)
    ],
)
def test_every_dataclass_of_settings_refuses_one_too(made):
    with pytest.raises(UserError, match=f"^no_such_setting: {made.__name__} has no such setting"):
        made(no_such_setting=1)


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (
            partial(lit_grpo.Sampling, 0.7),
            "Sampling takes temperature, .* got 0.7 without one",
        ),
        (partial(lit_grpo.LoRA, 8, 16), "LoRA takes rank, .* by name, got 8 without one"),
    ],
)
def test_a_value_without_its_name_is_refused_in_words(made, names):
    with pytest.raises(UserError, match=f"^{names}"):
        made()


def test_a_value_without_its_name_is_that_of_the_class_that_takes_it():
    class Words(lit_grpo.Reward):
        def __init__(self, words, weight=1.0):
            super().__init__(weight)

    with pytest.raises(UserError, match="^Reward takes name, weight, .* by name, got 1.0 without"):
        Words(["a"])
    with pytest.raises(UserError, match="^LoRA takes alpha, .* by name, got") as raised:
        lit_grpo.LoRA([*range(500)], rank=4)
    assert len(str(raised.value)) < 400


def test_a_checked_constructor_keeps_its_signature():
    assert [*signature(GRPOModule).parameters][:3] == ["policy", "rewards", "group_size"]
    assert signature(SFTModule).parameters["target_column"].default is None
