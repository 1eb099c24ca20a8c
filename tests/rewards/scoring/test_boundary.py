import asyncio
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from lit_grpo.rewards.scoring.boundary import as_score, as_scores, failed_scores
from lit_grpo.types import Outcome, Score
from lit_grpo.types.functions import PACKAGE


def scorer(completions):
    """The function whose results are converted."""


@pytest.mark.parametrize(
    "value",
    [
        *(True, 1, 1.0, Fraction(2, 2), Decimal(1)),
        *(np.float32(1), np.int64(1), np.bool_(True), np.ones(1)),
        *(torch.tensor(1), torch.tensor([1.0]), torch.tensor(True)),
    ],
)
def test_any_number_becomes_a_value(value):
    assert as_score(value, 0.5, scorer) == Score(value=1.0, seconds=0.5)


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (float("nan"), "finite value, got nan"),
        (float("inf"), "finite value, got inf"),
        ("1.0", "returned '1.0' (str of length 3), not a number"),
        ([1.0], "returned [1.0] (list of length 1), not a number"),
        ({"score": 1}, "(dict of length 1), not a number"),
        (1j, "returned 1j (complex), not a number"),
        (torch.ones(2), "2 elements"),
        (10**400, "too large"),
    ],
)
def test_anything_else_is_an_error_that_shows_it(value, detail):
    score = as_score(value, 0.5, scorer)
    assert (score.value, score.outcome, score.seconds) == (None, Outcome.ERROR, 0.5)
    assert detail in score.detail


def test_none_is_an_abstention():
    assert as_score(None, 0.5, scorer) == Score(value=None, outcome=Outcome.ABSTAIN, seconds=0.5)


def test_score_is_kept_with_its_own_seconds():
    limited = Score(value=None, outcome=Outcome.RATE_LIMITED, detail="429", cost=0.1)
    assert as_score(limited, 0.5, scorer) == Score(
        value=None, outcome=Outcome.RATE_LIMITED, detail="429", cost=0.1, seconds=0.5
    )
    assert as_score(Score(value=1.0, seconds=2.0), 0.5, scorer).seconds == 2.0


@pytest.mark.parametrize(
    "result", [[1.0, None], (1.0, None), np.array([1.0, None]), iter([1.0, None])]
)
def test_scores_of_a_group_share_its_seconds(result):
    assert as_scores(result, 2, 1.0, scorer) == (
        Score(value=1.0, seconds=0.5),
        Score(value=None, outcome=Outcome.ABSTAIN, seconds=0.5),
    )


@pytest.mark.parametrize(
    ("result", "detail"),
    [
        ([1.0], "returned 1 value for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        (1.0, "returned 1.0 (float) for 2 completions"),
        (None, "returned None (NoneType) for 2 completions"),
        ("ab", "returned 'ab' (str of length 2) for 2 completions"),
        ({0: 1.0, 1: 2.0}, "(dict of length 2) for 2 completions"),
        ({1.0, 2.0}, "(set of length 2) for 2 completions"),  # in no order
    ],
)
def test_wrong_number_of_scores_is_an_error_on_every_row(result, detail):
    scores = as_scores(result, 2, 1.0, scorer)
    assert [score.outcome for score in scores] == [Outcome.ERROR] * 2
    assert all(detail in score.detail for score in scores)


def test_exception_becomes_an_outcome_with_its_type_and_message():
    (score,) = failed_scores(KeyError("gold"), 1, 0.5)
    assert (score.outcome, score.detail) == (Outcome.ERROR, "KeyError: 'gold'")
    assert (
        failed_scores(TimeoutError(), 2, 1.0)
        == (Score(value=None, outcome=Outcome.TIMEOUT, detail="TimeoutError", seconds=0.5),) * 2
    )
    assert len(failed_scores(ValueError("x" * 9999), 1, 0.5)[0].detail) == 500


class NoJSON(OSError, ValueError):
    """What clients of services raise, such as requests for a reply that is no JSON."""


@pytest.mark.parametrize(
    "error",
    [
        KeyError("gold"),
        TypeError("not a number"),
        AttributeError("no strip"),
        NameError("not defined"),
        SystemExit(2),
        ValueError("no number"),
        re.error("unbalanced"),
        MemoryError(),
        StopIteration(),
    ],
)
def test_a_mistake_in_the_code_is_a_bug(error):
    assert failed_scores(error, 1, 0.5)[0].bug


def test_an_iterator_without_a_further_item_is_a_bug_in_a_coroutine_too():
    async def score():
        return next(iter([]))

    with pytest.raises(RuntimeError, match="coroutine raised StopIteration") as caught:
        asyncio.run(score())
    assert "next(iter([]))" in failed_scores(caught.value, 1, 0.5)[0].bug


@pytest.mark.parametrize("error", [ConnectionError("lost"), NoJSON("<html>"), RuntimeError("503")])
def test_a_lost_service_is_no_bug(error):
    assert not failed_scores(error, 1, 0.5)[0].bug


def raised_in(filename: str) -> str:
    """Return the bug of a missing key in code that stands in this file."""
    code = compile("def score():\n    return {}['gold']", filename, "exec")
    names = {}
    exec(code, names)
    try:
        names["score"]()
    except KeyError as error:
        (score,) = failed_scores(error, 1, 0.0)
    return score.bug


@pytest.mark.parametrize(
    ("filename", "shown"),
    [
        (f"{PACKAGE}rewards/math_answers/reward.py", "math_answers/reward.py"),
        (f"{PACKAGE.rstrip('/')}_extras/rewards.py", "lit_grpo_extras/rewards.py"),
        ("my_rewards.py", "my_rewards.py"),
    ],
)
def test_a_bug_shows_the_file_it_stands_in(filename, shown):
    assert f'{shown}", line 2, in score' in raised_in(filename)


def test_what_counts_as_an_outage_names_the_line_of_the_user():
    def score():
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError) as caught:
        score()
    (one,) = failed_scores(caught.value, 1, 0.5)
    line = score.__code__.co_firstlineno + 1
    assert one.detail == f"RuntimeError: shapes differ (test_boundary.py, line {line})"
    (of_a_library,) = failed_scores(RuntimeError("no frames"), 1, 0.5)
    assert of_a_library.detail == "RuntimeError: no frames"
