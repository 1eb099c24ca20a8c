"""Keywords that a constructor does not have, and what is named in their place."""

import re
from inspect import signature

import pytest

from lit_grpo import GRPOModule, SFTModule
from lit_grpo.types import UserError
from lit_grpo.types.keywords import NAMES, _in_program


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
        ("learning_rate", "Set optimizer, such as functools.partial(torch.optim.AdamW, lr=1e-5)."),
        ("train_dataset", "Set train of PromptData."),
        ("num_train_epochs", "Set max_epochs of Trainer."),
        ("output_dir", "Set run_dir of Trainer."),
        ("reward", "Did you mean rewards?"),
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
        ("beta", "objective.kl.coef of GRPOModule"),
    ):
        with pytest.raises(UserError, match=rf"Set {instead}\.$"):
            SFTModule("model", **{name: 1})


def test_every_name_of_other_libraries_has_a_place_in_a_program():
    places = [_in_program(key, "Trainer", []) for key in NAMES.values()]
    assert all(re.search(" of [A-Z]|functools", place) for place in places)


def test_a_checked_constructor_keeps_its_signature():
    assert [*signature(GRPOModule).parameters][:3] == ["policy", "rewards", "group_size"]
    assert signature(SFTModule).parameters["target_column"].default is None
