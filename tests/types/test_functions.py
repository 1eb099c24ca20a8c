"""The functions of a user: what they run, how they can be called, where they fail."""

import re
from dataclasses import dataclass
from functools import partial, wraps

import pytest

from lit_grpo.types.functions import (
    PACKAGE,
    assigned_attributes,
    carried_settings,
    defined_at,
    unfit_signature,
    unused_arguments,
    users_traceback,
)


def score(prompt, completion, *, scale=1.0):
    return scale


def logged(function):
    @wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Scorer:
    def __call__(self, prompt, completion):
        return 1.0

    def score(self, prompt, completion):
        return 1.0


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (score, score),
        (logged(score), score),
        (partial(logged(score), scale=2.0), score),
        (partial(partial(score, scale=2.0), scale=3.0), score),
        (Scorer(), Scorer.__call__),
    ],
    ids=["plain", "decorated", "partial and decorated", "partial of a partial", "object"],
)
def test_a_callable_is_defined_where_its_body_is(function, named):
    assert defined_at(function) == (named, named.__code__)


def test_a_method_is_defined_in_its_class():
    method = Scorer().score
    assert defined_at(method) == (method, Scorer.score.__code__)


def test_a_builtin_has_no_code():
    assert defined_at(len) == (len, None)


def scaled(scale, options=None):
    def call(prompt, completion):
        return scale, options, later

    if scale is None:
        later = 1.0
    return call


class Settled:
    def __init__(self, scale, start=score):
        self.scale, self.start, self._cache = scale, start, {}

    def __call__(self, prompt, completion):
        return self.scale

    def score(self, prompt, completion):
        return self.scale


@dataclass(frozen=True, slots=True)
class Slotted:
    scale: float = 0.5

    def __call__(self, prompt, completion):
        return self.scale


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (score, {}),
        (len, {}),
        (scaled(0.5), {"scale": 0.5, "options": None}),
        (scaled(True, {"a": (1, "b")}), {"scale": True, "options": {"a": [1, "b"]}}),
        (scaled(object(), [score]), {}),
        (logged(scaled(0.5)), {"scale": 0.5, "options": None}),
        (partial(score, scale=2.0), {"function": "score", "scale": 2.0}),
        (partial(score, "2+2=", score), {"function": "score", "argument 1": "2+2="}),
        (Settled(0.5), {"scale": 0.5}),
        (Settled(0.5).score, {"scale": 0.5}),
        (partial(Settled(0.5), prompt=""), {"function": "Settled", "scale": 0.5, "prompt": ""}),
        (Slotted(), {"scale": 0.5}),
    ],
)
def test_a_function_carries_plain_values(function, settings):
    assert carried_settings(function) == settings


def test_of_long_values_there_is_a_checksum():
    long, other = (carried_settings(scaled([end] * 1000))["scale"] for end in (0, 1))
    assert long.startswith("3,000 characters (checksum ")
    assert long != other


@pytest.mark.parametrize(
    "function",
    [
        score,
        partial(score, scale=2.0),
        Scorer(),
        Scorer().score,
        lambda *texts: 1.0,
        lambda prompt, completion, further=None: 1.0,
        dict,  # its signature is not known
    ],
)
def test_a_function_that_takes_the_arguments_is_fit(function):
    assert unfit_signature(function, ["prompt", "completion"]) is None


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (lambda completion: 1.0, "(completion)"),
        (lambda a, b, c: 1.0, "(a, b, c)"),
        (lambda a, *, b: 1.0, "(a, *, b)"),
        (lambda completion, prompt: 1.0, "(completion, prompt)"),
        (lambda text, prompt: 1.0, "(text, prompt)"),
        (Scorer.score, "(self, prompt, completion)"),
    ],
)
def test_the_signature_of_an_unfit_function_is_returned(function, signature):
    assert str(unfit_signature(function, ["prompt", "completion"])) == signature


def raised_through(*filenames):
    """Return an error that came through a function in each of these files, in the last one first.

    The frame of this function is left out.
    """
    names = {"call": {}.__getitem__}
    for filename in reversed(filenames):
        code = "def call(key, inner=call):\n    return inner(key)\n"
        exec(compile(code, filename, "exec"), names)
    with pytest.raises(KeyError) as caught:
        names["call"]("gold")
    return caught.value.with_traceback(caught.value.__traceback__.tb_next)


OURS = f"{PACKAGE}rewards/scoring/boundary.py"


@pytest.mark.parametrize(
    ("filenames", "shown"),
    [
        ([OURS, "mine.py", OURS], ["mine.py", OURS]),
        ([OURS, OURS, "mine.py"], ["mine.py"]),
        (["mine.py", OURS], ["mine.py", OURS]),
        ([OURS, OURS], [OURS, OURS]),
    ],
    ids=["between", "inside", "outside", "nowhere"],
)
def test_a_traceback_begins_at_the_users_first_line_if_there_is_one(filenames, shown):
    text = users_traceback(raised_through(*filenames))
    assert re.findall(r'File "(.+?)", line 2, in call', text) == shown
    assert text.endswith("KeyError: 'gold'")


def test_arguments_that_are_never_read_are_found_through_decorators_and_closures():
    def keeps(first, second, *rest, third=None, fourth=3, **others):
        first = 1
        return first, lambda: fourth

    assert unused_arguments(keeps) == unused_arguments(logged(keeps)) == {"second", "third"}
    assert unused_arguments(len) == set()


def test_assigned_attributes_are_found_through_decorators():
    class Counter:
        @logged
        def __init__(self, start):
            self.start = start
            if start:
                self.count, self.start = start, 0
            print(self.other)

    assert assigned_attributes(Counter.__init__) == ["start", "count"]
    assert assigned_attributes(object.__init__) == []
