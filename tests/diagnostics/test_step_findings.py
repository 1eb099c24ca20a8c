from dataclasses import replace

import pytest
from toy_rollouts import failed, rollouts

from lit_grpo.diagnostics.step_findings import no_signal
from lit_grpo.types import Outcome

DOWN = failed(Outcome.UNAVAILABLE, "connection refused")


def test_one_group_that_differs_is_a_signal():
    assert no_signal(rollouts([[0.0, 0.0], [0.0, 1.0]])) == []


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([[0.0, 0.0], [0.0, 0.0]], "There is no signal: every reward is exactly 0."),
        ([[0.5, 0.5], [1.0, 1.0]], "All advantages are 0: inside each group all rewards are equal"),
        (
            [[1.0, None], [None, 0.0]],
            "There is no signal: no group has two valid rows to compare. The most common "
            "failure: 50% of the scores of reward 'math' ended as",
        ),
        (
            [[DOWN, DOWN], [DOWN, None]],
            "There is no signal: no row is valid: 75% of the scores of reward 'math' ended as "
            "unavailable, for instance: connection refused. Check that its service runs",
        ),
    ],
)
def test_the_cause_of_a_missing_signal_is_named(rewards, words):
    assert no_signal(rollouts(rewards))[0].startswith(words)


def test_groups_whose_weights_are_too_old_are_the_cause_of_a_missing_signal():
    batch = rollouts([[0.0, 1.0]] * 3)
    (why,) = no_signal(batch.without_stale([True] * 3))
    assert why.startswith("There is no signal: no row is valid: 100% of the groups were dropped: ")
    assert why.endswith("raise model.max_head_offpolicyness.")
    assert not no_signal(batch.without_stale([True, True, False]))


def test_rewards_of_zero_come_with_the_likely_cause():
    _, cause = no_signal(rollouts([[0.0, 0.0]]))
    assert "no completion has the format or answer that they look for" in cause


def test_a_reward_that_mostly_returns_none_is_named_where_the_others_are_equal():
    none = failed(Outcome.ABSTAIN, "")
    (why,) = no_signal(rollouts([[1.0, 1.0, none, none, none, none]] * 2))
    assert "only 4 of 12 rows have a reward, and inside each group those are equal." in why
    assert "67% of the scores of reward 'math' ended as abstain" in why
    assert "returned None" in why


def test_a_completion_of_a_conversation_is_no_text_for_a_function():
    batch = rollouts([[0.0, 0.0]])
    (group,) = batch.groups
    prompt = replace(group.prompt, messages=({"role": "user", "content": "1+1="},))
    _, cause = no_signal(replace(batch, groups=(replace(group, prompt=prompt),)))
    assert "gets each completion as a conversation, whose text is completion[0]" in cause
    _, cause = no_signal(batch)
    assert "conversation" not in cause


def test_an_answer_that_is_a_number_is_no_text_for_a_function():
    batch = rollouts([[0.0, 0.0]])
    (group,) = batch.groups
    prompt = replace(group.prompt, answer="2", given_answer=2)
    _, cause = no_signal(replace(batch, groups=(replace(group, prompt=prompt),)))
    assert "whose answer is 2," in cause
    assert "A reward function gets this answer as int, which never equals a text." in cause
    assert "as int" not in no_signal(batch)[1]
