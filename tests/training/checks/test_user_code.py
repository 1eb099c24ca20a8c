"""Which changes of a user's rewards and functions a resumed run notices."""

from functools import partial

import pytest

from lit_grpo.rewards import FunctionReward, LengthReward, MathReward, ProcessReward
from lit_grpo.rewards.functions.path import load_function
from lit_grpo.training.checks.user_code import (
    describe_function_code,
    describe_reward_code,
    function_of,
)

FILE = """
from lit_grpo.rewards import Reward

def helper(text):
    return len(text)

def brevity(completions, **columns):
    return [-len(one) for one in completions]

class Base(Reward):
    factor = 1.0

class Words(Base):
    def score(self, prompt, completion):
        return self.factor * len(completion.text.split())
"""


@pytest.fixture
def codes(tmp_path):
    """Write the file with a change, and return what is known of the function and of the class."""

    def read(number: int, before: str = "", after: str = ""):
        path = tmp_path / f"{number}.py"
        path.write_text(FILE.replace(before, after) if before else FILE)
        function = load_function(f"{path}:brevity")
        words = load_function(f"{path}:Words")
        return describe_reward_code(FunctionReward(function)), describe_reward_code(words())

    return read


def test_a_change_of_the_function_or_the_class_is_noticed_and_one_beside_them_is_not(codes):
    brevity, words = codes(0)
    assert codes(1) == codes(2, "len(text)", "0") == (brevity, words)
    other, same = codes(3, "-len(one)", "1 / len(one)")
    assert other != brevity
    assert same == words
    same, other = codes(4, "completion.text.split()", "completion.text")
    assert same == brevity
    assert other != words
    assert codes(5, "factor = 1.0", "factor = 2.0")[1] != words


def test_the_code_is_that_of_the_users_whatever_calls_it(codes):
    brevity, _ = codes(0)

    def one(completions, **columns):
        return [1.0 for _ in completions]

    expected = describe_reward_code(FunctionReward(one))
    assert describe_reward_code(FunctionReward(partial(one))) == expected
    assert describe_reward_code(ProcessReward(FunctionReward(one))) == expected
    assert expected != brevity
    assert describe_reward_code(MathReward()) is None
    assert describe_reward_code(ProcessReward(LengthReward(start_tokens=2, end_tokens=8))) is None


def test_a_function_without_a_source_is_not_compared():
    space = {}
    exec("def f(completions): return [1.0]", space)
    assert describe_reward_code(FunctionReward(space["f"])) is None


def test_the_function_of_a_reward_is_what_it_calls():
    def one(completions, **columns):
        return [1.0 for _ in completions]

    assert function_of(ProcessReward(FunctionReward(one))) is one
    assert function_of(MathReward()) is None


FUNCTIONS = """
class Base:
    scale = 1.0

class Soft(Base):
    def __call__(self, inputs, objective):
        return self.loss(inputs, objective)

    def loss(self, inputs, objective):
        return -self.scale * inputs.ratio

def plain(inputs, objective):
    return -inputs.ratio

short, other = (
    lambda inputs, objective: -inputs.ratio, lambda inputs, objective: inputs.ratio
)
long = (
    lambda inputs, objective: -inputs.ratio
    * inputs.advantages
)
"""


@pytest.fixture
def loaded(tmp_path):
    """Write the file with a change, and return a function that describes what has a name in it."""

    def load(before: str = "", after: str = ""):
        path = tmp_path / f"{len([*tmp_path.iterdir()])}.py"
        path.write_text(FUNCTIONS.replace(before, after) if before else FUNCTIONS)

        def describe(name: str) -> str:
            found = load_function(f"{path}:{name}")
            return describe_function_code(found() if isinstance(found, type) else found)

        return describe

    return load


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("scale = 1.0", "scale = 2.0", {"Soft"}),
        ("-self.scale", "self.scale", {"Soft"}),
        ("    return -inputs", "    return inputs", {"plain"}),
        ("\ndef plain", "\n# a comment\n\ndef plain", set()),
        ("* inputs.advantages", "/ inputs.advantages", {"long"}),
        (": inputs.ratio\n)", ": inputs.ratio.exp()\n)", {"other"}),
    ],
)
def test_a_change_of_a_function_an_object_or_a_lambda_is_noticed(loaded, before, after, changed):
    one, other = loaded(), loaded(before, after)
    names = ["Soft", "plain", "short", "other", "long"]
    assert {name for name in names if one(name) != other(name)} == changed


def test_partials_do_not_count_and_what_has_no_source_is_not_compared():
    space = {}
    exec("def f(inputs, objective): return inputs", space)
    assert describe_function_code(space["f"]) is None
    assert describe_function_code(eval("lambda inputs: inputs")) is None

    def loss(inputs, objective, scale=1.0):
        return scale * inputs

    assert describe_function_code(partial(loss, scale=2.0)) == describe_function_code(loss)


def typed_in(before: str = "", after: str = ""):
    """Return what is known of the function and the class where they have no file."""
    namespace = {"__name__": "__main__"}
    exec(FILE.replace(before, after) if before else FILE, namespace)
    words = namespace["Words"]()
    return describe_reward_code(FunctionReward(namespace["brevity"])), describe_reward_code(words)


def test_code_that_is_typed_in_is_known_by_what_it_does():
    brevity, words = typed_in()
    assert None not in (brevity, words)
    assert typed_in("\ndef helper", "\n\n\ndef helper") == (brevity, words)
    assert typed_in("len(text)", "0") == (brevity, words)
    other, same = typed_in("-len(one)", "1 - len(one)")
    assert (other != brevity, same == words) == (True, True)
    assert typed_in("completions, **", "completions, scale=1.0, **")[0] not in (
        brevity,
        typed_in("completions, **", "completions, scale=2.0, **")[0],
    )
    for change in (("split()", "strip()"), ("factor = 1.0", "factor = 2.0")):
        same, other = typed_in(*change)
        assert (same == brevity, other != words) == (True, True)
