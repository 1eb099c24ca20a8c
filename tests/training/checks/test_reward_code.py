"""Which changes of a user's reward a resumed run notices."""

from functools import partial

import pytest

from lit_grpo.rewards import FunctionReward, LengthReward, MathReward, ProcessReward
from lit_grpo.rewards.function_path import load_function
from lit_grpo.training.checks.reward_code import describe_code

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
        return describe_code(FunctionReward(function)), describe_code(words())

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

    assert describe_code(FunctionReward(partial(one))) == describe_code(FunctionReward(one))
    assert describe_code(ProcessReward(FunctionReward(one))) == describe_code(FunctionReward(one))
    assert describe_code(FunctionReward(one)) != brevity
    assert describe_code(MathReward()) is None
    assert describe_code(ProcessReward(LengthReward(start_tokens=2, end_tokens=8))) is None


def test_a_function_without_a_source_is_not_compared():
    space = {}
    exec("def f(completions): return [1.0]", space)
    assert describe_code(FunctionReward(space["f"])) is None
