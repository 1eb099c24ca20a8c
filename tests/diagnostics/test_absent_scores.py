"""Scores without a value, as they are reported."""

from dataclasses import replace

from toy_rollouts import failed, rollouts

from lit_grpo.diagnostics.absent_scores import never_scored
from lit_grpo.types import Outcome
from lit_grpo.types.text import shorten_middle


def with_reward(*outcomes):
    """Return a step whose reward 'other' ended so in its two groups of two rows."""
    batch = rollouts([[0.0, 1.0], [0.0, 1.0]])
    groups = [
        replace(group, scores=group.scores | {"other": (failed(one),) * 2})
        for group, one in zip(batch.groups, outcomes, strict=True)
    ]
    return replace(batch, groups=groups, parts=batch.parts | {"other": batch.rewards})


def test_a_reward_that_returns_none_for_every_completion_is_named():
    none, others = Outcome.ABSTAIN, Outcome.OTHER_SOURCE
    found = never_scored(with_reward(none, none))
    assert [*found] == ["other"]
    assert found["other"].startswith("Reward 'other' gave none of 4 completions a value, so it do")
    assert "check whether a return is missing, unless that is intended." in found["other"]
    assert "of 2 completions" in never_scored(with_reward(none, others))["other"]
    for outcomes in ((none, Outcome.ERROR), (others, others)):
        assert never_scored(with_reward(*outcomes)) == {}


def test_a_long_failure_is_cut_in_the_middle_since_it_begins_with_what_and_ends_with_why():
    text = "not a chat completion: " + "x" * 500 + " (check base_url)"
    shown = shorten_middle(f" {text} ")
    assert shown.startswith("not a chat completion: x")
    assert shown.endswith("x (check base_url)")
    assert " … " in shown
    assert len(shown) < 250
    assert shorten_middle(" short ") == "short"
