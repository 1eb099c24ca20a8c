import pytest
from text_rewards import Contains, Siblings
from tiny import completion, prompt

from lit_grpo.rewards import LengthReward, Reward
from lit_grpo.rewards.reward_checks import check_settings
from lit_grpo.types import UserError


class HTTPStatusReward(Contains):
    pass


class WithoutSuper(Reward):
    def __init__(self, needle):
        self.needle = needle

    def score(self, prompt, completion):
        return float(self.needle in completion.text)


def test_default_name_is_the_class_name_in_snake_case_without_its_suffix():
    assert Contains().name == "contains"
    assert HTTPStatusReward().name == "http_status"
    assert LengthReward(1, 2).name == "length"
    assert Contains(name="mine").name == "mine"


def test_subclass_without_super_init_has_the_default_settings():
    reward = WithoutSuper("x")
    check_settings(reward)
    settings = (reward.name, reward.weight, reward.on_error, reward.timeout_seconds)
    assert settings == ("without_super", 1.0, "mask", None)


def test_overridden_method_decides_how_a_reward_is_called():
    assert (Contains().is_grouped, Contains().is_async) == (False, False)
    assert (Siblings().is_grouped, Siblings().is_async) == (True, True)
    assert Contains().score(prompt(), completion(text="a x")) == 1.0


def test_argument_that_a_reward_does_not_take_is_an_error():
    with pytest.raises(UserError, match="needle"):
        Contains(needle="x")
    with pytest.raises(UserError, match="^max_tokens: LengthReward has no such setting"):
        LengthReward(1, 2, max_tokens=3)
