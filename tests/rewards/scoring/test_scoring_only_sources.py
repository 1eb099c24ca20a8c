"""Rewards that are only for some sources: neither a zero nor a failure for the others."""

from dataclasses import replace

import pytest
from code_rewards import Longest
from tiny import completion, prompt

from lit_grpo.diagnostics.absent_scores import find_failure, most_common_failure
from lit_grpo.diagnostics.step_counts import count_step
from lit_grpo.objective import AdvantageConfig
from lit_grpo.objective.advantages import compute_advantages
from lit_grpo.rewards import ProcessReward, Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.training.collecting.score_status import score_status
from lit_grpo.training.metrics import Metrics, add_rollout_metrics
from lit_grpo.types import Completion, Outcome, UserError


class Length(Reward):
    def score(self, prompt, completion):
        return len(completion.token_ids)


class FailsOnOthers(Reward):
    """Knows only the column of its own source; checks it, too."""

    def score(self, prompt, completion):
        return prompt.columns["gold"] * len(completion.token_ids)

    def check(self, prompts):
        for one in prompts:
            assert "gold" in one.columns


class GroupedSum(Reward):
    def score_group(self, prompt, completions):
        total = sum(len(one.token_ids) for one in completions)
        return [len(one.token_ids) / total for one in completions]


def of(source: str, **columns):
    return replace(prompt(id=source, **columns), source=source)


PROMPTS = [of("sums", gold=10), of("open")]
GROUPS = [[completion([1]), completion([1, 2, 3])], [completion([1]), completion([1, 2])]]


def scored(*rewards: Reward, groups=GROUPS):
    with RewardSuite(rewards) as suite:
        suite.check_sources(("sums", "open"))
        suite.check(PROMPTS)
        return suite.score(PROMPTS, groups)


@pytest.mark.parametrize("on_error", ["mask", "drop_group", "raise", "retry"])
def test_a_reward_is_left_out_of_the_sum_of_other_sources_and_has_not_failed(on_error):
    batch = scored(
        Length(only_sources=["open"], weight=2.0),
        FailsOnOthers(only_sources=["sums"], on_error=on_error),
    )
    assert batch.rewards.tolist() == [[10.0, 30.0], [2.0, 4.0]]
    assert batch.valid.all()
    assert batch.parts["length"].isnan().tolist() == [[True, True], [False, False]]
    outcomes = [score.outcome for score in batch.groups[1].scores["fails_on_others"]]
    assert outcomes == [Outcome.OTHER_SOURCE] * 2
    assert find_failure(batch) is None
    status = score_status(batch, list(batch.parts))
    assert (status.num_retriable, status.num_absent, status.bugs) == (0, 0, {})


def test_metrics_of_a_reward_are_those_of_its_sources():
    metrics = Metrics()
    add_rollout_metrics(metrics, scored(Length(), FailsOnOthers(only_sources=["sums"])))
    values = metrics.merged()
    assert values["reward/fails_on_others/mean"] == 20.0
    assert values["reward/fails_on_others/ok_fraction"] == 1.0
    assert values["reward/length/ok_fraction"] == 1.0
    assert values["reward/sums/mean"] == 22.0
    assert values["reward/open/mean"] == 1.5
    assert values["completions/open/mean_length"] == 1.5
    assert not [name for name in values if "other_source" in name]
    assert (values["reward/sums/frac_zero_std"], values["reward/open/frac_zero_std"]) == (0, 0)
    metrics, equal = Metrics(), [GROUPS[0], [completion([1]), completion([2])]]
    add_rollout_metrics(metrics, scored(Length(), groups=equal))
    values = metrics.merged()
    assert (values["reward/sums/frac_zero_std"], values["reward/open/frac_zero_std"]) == (0, 1)


def test_a_bug_on_all_rows_of_its_sources_is_one_on_all_its_rows():
    batch = scored(Length(), Broken(only_sources=["sums"]))
    status = score_status(batch, list(batch.parts))
    assert status.only_bugs == {"broken"}
    assert batch.valid.tolist() == [[False, False], [True, True]]


def test_the_share_of_failures_is_one_of_the_rows_that_the_reward_is_for():
    batch = scored(Length(), Broken(only_sources=["sums"]))
    assert find_failure(batch).fraction == 1
    both = count_step(batch) + count_step(
        scored(Length(), Length(only_sources=["sums"], name="broken"))
    )
    assert both.asked == {"length": 8, "broken": 4}
    assert most_common_failure(both).fraction == 0.5


class Broken(Reward):
    def score(self, prompt, completion):
        return {}["missing"]


@pytest.mark.slow
def test_rewards_of_groups_and_in_processes_are_asked_for_their_sources_only():
    groups = [GROUPS[0], [completion(text="a"), completion(text="the longer one")]]
    far = ProcessReward(Longest(only_sources=["open"], name="far"))
    batch = scored(GroupedSum(only_sources=["sums"]), far, groups=groups)
    assert batch.rewards.tolist() == [[0.25, 0.75], [0.0, 1.0]]


def test_a_completion_that_could_not_be_sampled_stays_invalid():
    groups = [GROUPS[0], [completion([1]), Completion.failed("lost")]]
    batch = scored(Length(), FailsOnOthers(only_sources=["sums"]), groups=groups)
    assert batch.valid.tolist() == [[True, True], [True, False]]
    (sampled, lost) = batch.groups[1].scores["length"]
    assert (sampled.outcome, lost.outcome) == (Outcome.OK, Outcome.NOT_SAMPLED)


def test_advantages_that_are_normalised_by_reward_ignore_it():
    rewards = [Length(), FailsOnOthers(only_sources=["sums"])]
    batch = scored(*rewards)
    table = batch.reward_table({"length": 1.0, "fails_on_others": 1.0})
    config = AdvantageConfig(combine="normalise_then_sum")
    both = compute_advantages(table, config)
    assert not both.isnan().any()
    assert (both[1] != 0).all()


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([Length(only_sources=["sum"])], r"sources of data.sources \(sums, open\), got 'sum'"),
        ([Length(only_sources=["sums"])], "got none for 'open'"),
        ([Length(only_sources=["sums"]), GroupedSum(weight=0)], "got none for 'open'"),
        ([Length(only_sources=["sum"])], r"\(sums, open\), got 'sum'.* Did you mean sums\?"),
        ([Length(name="open")], "must not have the same name, got 'open'"),
    ],
)
def test_rewards_that_do_not_fit_the_sources_are_refused(rewards, reason):
    with pytest.raises(UserError, match=reason):
        RewardSuite([Length(weight=0, name="watch"), GroupedSum(weight=0, name="g"), *rewards]
                    ).check_sources(("sums", "open"))  # fmt: skip


def test_sources_need_a_mixture_and_a_list():
    with pytest.raises(UserError, match="the data is no mixture"):
        RewardSuite([Length(only_sources=["sums"])]).check_sources(())
    for wrong in ("sums", []):
        with pytest.raises(UserError, match="only_sources must be a list of sources"):
            RewardSuite([Length(only_sources=wrong)])
