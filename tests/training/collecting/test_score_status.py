"""Which scores of a step are missing, and what is said about them."""

from dataclasses import replace

import pytest
from tiny import rollouts

from lit_grpo.training.collecting.score_status import (
    ScoreStatus,
    find_spent_budget,
    is_absent,
    over_ranks,
    score_status,
)
from lit_grpo.types import Completion, Outcome, Score

OK = Score(value=1.0)
LATE = Score(value=None, outcome=Outcome.TIMEOUT, detail="late")
DECLINED = Score(value=None, outcome=Outcome.ABSTAIN)


def bug(detail: str, *, is_permanent: bool = True) -> Score:
    return Score(
        value=None,
        outcome=Outcome.ERROR,
        detail=detail,
        bug=f"line 7: {detail}",
        is_permanent=is_permanent,
    )


def scored(**scores):
    """Return one group with the scores of each reward."""
    batch = rollouts([[1.0] * len(next(iter(scores.values())))])
    return replace(batch, groups=(replace(batch.groups[0], scores=scores),))


def status_of(**scores) -> ScoreStatus:
    return score_status(scored(**scores), list(scores))


def test_a_reward_without_a_value_on_one_rank_may_have_some_on_another():
    declined, ok = Score(value=None, outcome=Outcome.ABSTAIN), Score(value=1.0)
    one = status_of(a=(ok, ok), b=(declined, declined), c=(declined, declined))
    other = status_of(a=(ok, ok), b=(ok, declined), c=(declined, declined))
    both = over_ranks([one, other])
    assert both.with_value == {"a", "b"}
    assert {*both.without_value} - both.with_value == {"c"}
    assert both.without_value["c"].startswith("Reward 'c' gave none of 2 completions a value")


def test_a_reward_that_does_not_apply_is_not_named_as_the_cause_of_an_outage():
    down = Score(value=None, outcome=Outcome.TIMEOUT, detail="late")
    declined = Score(value=None, outcome=Outcome.ABSTAIN)
    ok = Score(value=1.0)
    scored = rollouts([[1.0] * 4])
    scores = {"a": (down, down, down, ok), "b": (declined,) * 4}
    scored = replace(scored, groups=(replace(scored.groups[0], scores=scores),))
    status = score_status(scored, ["a", "b"])
    assert status.num_retriable == 3
    assert str(status).startswith(
        "3 of the 4 rows (75%) have no score: 75% of the scores of reward 'a' ended as timeout"
    )


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([Outcome.BUDGET_SPENT, None, None, None], "would stop at such a step: the judge's budget"),
        ([Outcome.NOT_SAMPLED] * 3 + [None], "would stop at such a step: 3 of the 4 rows"),
        (
            [Outcome.TIMEOUT] * 3 + [None],
            "would pause, retry and in the end stop at such a step: 3",
        ),
        ([Outcome.TIMEOUT, None, None, None], ""),
    ],
)
def test_what_a_run_would_do_with_a_step_is_what_the_gate_does(outcomes, said):
    scores = tuple(
        Score(value=1.0) if one is None else Score(value=None, outcome=one) for one in outcomes
    )
    scored = rollouts([[1.0] * 4])
    group = scored.groups[0]
    completions = tuple(
        Completion.failed("lost") if one is Outcome.NOT_SAMPLED else completion
        for one, completion in zip(outcomes, group.completions, strict=True)
    )
    group = replace(group, scores={"a": scores}, completions=completions)
    status = score_status(replace(scored, groups=(group,)), ["a"])
    why = status.why_not_trained(0.5)
    assert said in why
    assert bool(why) == bool(said)


def test_rows_are_counted_by_what_a_retry_can_do_for_them():
    status = status_of(a=(OK, LATE, bug("x"), LATE), b=(OK, OK, LATE, LATE))
    assert (status.num_rows, status.num_retriable, status.num_with_bug) == (4, 2, 1)
    assert status.num_absent == 3
    assert status.num_bugs == {"a": 1}
    assert status.advice.endswith("or raise model.outage.max_absent_fraction.")
    assert status_of(a=(LATE, LATE)).advice == "Fix the cause and resume."


def test_abstentions_and_completions_that_are_too_long_are_not_missing():
    long = Score(value=None, outcome=Outcome.TRUNCATED)
    status = status_of(a=(OK, DECLINED, long))
    assert (status.num_absent, status.failure) == (0, None)


@pytest.mark.parametrize("failed", [LATE, bug("x"), bug("x", is_permanent=False)])
def test_a_failure_leaves_a_score_absent_and_an_abstention_does_not(failed):
    assert is_absent(failed)
    assert not is_absent(OK)
    assert not is_absent(DECLINED)
    assert not is_absent(Score(value=None, outcome=Outcome.TRUNCATED))
    assert is_absent(Score(value=None, outcome=Outcome.NOT_SAMPLED))


def test_a_reward_has_only_bugs_if_it_gave_nothing_else_on_a_row_that_it_can_read():
    long = Score(value=None, outcome=Outcome.TRUNCATED)
    first = bug("x", is_permanent=False)
    status = status_of(a=(first, long, first), b=(first, OK, first), c=(first, LATE, LATE))
    assert status.bugs.keys() == {"a", "b", "c"}
    assert status.only_bugs == {"a"}


def test_a_bug_is_described_with_its_row_its_columns_and_where_it_was():
    status = status_of(a=(bug("x"), bug("y"), OK))
    message = status.describe_bug("a")
    assert message.startswith("Stopped because of a bug in reward 'a' on 2 of the 3 rows, which")
    assert "Row p0 with the columns none:\nline 7: x" in message
    assert message.endswith("or raise model.outage.max_absent_fraction.")
    everywhere = status_of(a=(bug("x"), bug("x"))).describe_bug("a")
    assert "a bug in reward 'a' on every row, which" in everywhere
    assert everywhere.endswith("lit-grpo rewards RUN.")


def test_a_spent_budget_makes_retries_pointless():
    spent = Score(value=None, outcome=Outcome.BUDGET_SPENT, detail="$5.00 of $5.00")
    batch = scored(a=(OK, LATE), b=(OK, spent))
    assert find_spent_budget(batch, ["a"]) == ""
    assert find_spent_budget(batch, ["a", "b"]) == "the judge's budget is spent: $5.00 of $5.00."
    assert score_status(batch, ["a", "b"]).fatal.startswith("the judge's budget is spent: $5.00")


def test_the_status_of_all_ranks_has_the_rows_of_each_and_the_worst_failure():
    one = status_of(a=(LATE, OK, bug("x"), OK))
    other = status_of(a=(bug("y"), LATE, LATE, bug("z")))
    both = over_ranks([one, other])
    assert (both.num_rows, both.num_retriable, both.num_with_bug) == (8, 3, 3)
    assert both.failure == other.failure
    assert both.num_bugs == {"a": 3}
    assert (one.only_bugs, both.only_bugs) == (frozenset(), frozenset())


def test_a_reward_that_works_on_one_rank_has_not_only_bugs():
    broken, fine = status_of(a=(bug("x"),)), status_of(a=(OK,))
    assert broken.only_bugs == {"a"}
    assert over_ranks([broken, fine]).only_bugs == frozenset()
    assert over_ranks([fine, fine]) == ScoreStatus(
        num_rows=2, not_bugs=frozenset({"a"}), with_value=frozenset({"a"})
    )
