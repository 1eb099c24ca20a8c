import pytest
from text_rewards import Contains, Siblings

from lit_grpo.rewards import Reward
from lit_grpo.rewards.reward_checks import check_settings
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import UserError


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("name", "a/b", "letters, digits"),
        ("name", "", "letters, digits"),
        ("weight", float("nan"), "finite"),
        ("weight", float("inf"), "finite"),
        ("on_error", "ignore", "retry, mask, drop_group, raise"),
        ("timeout_seconds", 0, "positive"),
        ("num_retries", -1, ">= 0"),
    ],
)
def test_setting_out_of_range_is_refused_by_name(setting, value, rule):
    reward = Contains()
    setattr(reward, setting, value)
    key = f"Contains.init_args.{setting}"
    with pytest.raises(ValueError, match=f"{setting} must be .*{rule}.* Set {key}"):
        check_settings(reward)


def test_reward_that_overrides_nothing_is_refused():
    class Empty(Reward):
        pass

    with pytest.raises(ValueError, match="Empty has neither"):
        check_settings(Empty())


class OfTRL(Reward):
    def score(self, completion):
        return 1.0


class WithoutSelf(Reward):
    async def score(prompt, completion):
        return 1.0


class Swapped(Reward):
    """It would score the prompt."""

    def score(self, completion, prompt):
        return float(len(completion.text))


class OfColumns(Reward):
    """It would score the prompt, too."""

    def score(self, completions, answer):
        return float(len(completions.text))


class NamedOnly(Reward):
    def score_group(self, prompt, *, completions):
        return [1.0]


class ChecksNothing(Contains):
    def check(self):
        return


class TakesMore(Reward):
    def score(self, prompt, completion, scale=2.0, **columns):
        return scale


class TakesAll(Reward):
    def score_group(self, *arguments):
        return [1.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (OfTRL(), r"OfTRL.score must take self, prompt, completion, got score\(self, completion\)"),
        (OfTRL(), r"Define def score\(self, prompt, completion\)\.$"),
        (WithoutSelf(), r"got score\(prompt, completion\).*Define async def score\(self, prompt"),
        (
            Swapped(),
            r"Swapped.score must take self, prompt, .*got score\(self, completion, ",
        ),
        (OfColumns(), r"self, prompt, completion, got score\(self, completions, answer\)"),
        (NamedOnly(), r"NamedOnly.score_group must take self, prompt, completions, got"),
        (ChecksNothing(), r"ChecksNothing.check must take self, prompts, got check\(self\)"),
    ],
)
def test_a_method_that_does_not_take_what_it_is_called_with_is_refused(reward, message):
    with pytest.raises(UserError, match=message):
        check_settings(reward)


@pytest.mark.parametrize("reward", [TakesMore(), TakesAll(), Contains(), Siblings()])
def test_a_method_may_take_more_than_it_is_called_with(reward):
    check_settings(reward)


def test_a_setting_as_an_attribute_of_a_class_is_refused_as_it_has_no_effect():
    class Half(Reward):
        weight = 0.5

        def score(self, prompt, completion):
            return 1.0

    with pytest.raises(UserError, match=r"got Half.weight = 0.5 .*__init__\(weight=0.5\) in Half"):
        check_settings(Half())

    class Quarter(Half):
        def __init__(self):
            super().__init__(weight=0.5)

    check_settings(Quarter())


class DropsWeight(Reward):
    def __init__(self, scale=1.0, weight=1.0):
        self.scale = scale

    def score(self, prompt, completion):
        return self.scale


class Inherits(DropsWeight):
    def __init__(self, **settings):
        super().__init__(**settings)


class DropsOnError(DropsWeight):
    def __init__(self, *, on_error="mask", **settings):
        Reward.__init__(self, **settings)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (DropsWeight(2.0), r"^DropsWeight\.__init__ must pass weight on, .*\(weight=weight, "),
        (Inherits(weight=0.1), r"^DropsWeight\.__init__ must pass weight on"),
        (DropsOnError(), r"^DropsOnError\.__init__ must pass on_error on"),
    ],
)
def test_a_setting_that_an_init_takes_and_never_uses_is_refused(reward, message):
    with pytest.raises(UserError, match=message):
        RewardSuite([reward])


class Constant(Reward):
    def score(self, prompt, completion):
        return 1.0


class SavesOnly(Constant):
    def state_dict(self):
        return {"n": 1}


class LoadsOnly(Constant):
    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("kind", "missing"), [(SavesOnly, "load_state_dict"), (LoadsOnly, "state_dict")]
)
def test_half_a_state_is_refused(kind, missing):
    with pytest.raises(UserError, match=rf"; {kind.__name__} has no {missing} \(a resumed run"):
        RewardSuite([kind()])


class Halves(Constant):
    def __init__(self, weight: float | None = None, **settings):
        weight = 1.0 if weight is None else weight / 2
        Reward.__init__(self, weight=weight, **settings)


class Sets(Constant):
    def __init__(self, weight, num_retries=3, timeout_seconds=None):
        self.weight, self.client = weight, (num_retries, lambda: timeout_seconds)


def test_a_setting_may_be_used_in_any_way():
    rewards = [Halves(2.0, name="a"), Halves(None, name="b"), Sets(0.1)]
    RewardSuite(rewards)
    assert [one.weight for one in rewards] == [1.0, 1.0, 0.1]
