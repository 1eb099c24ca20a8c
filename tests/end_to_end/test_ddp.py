"""Two real processes take the step that one would take on all of their rollouts."""

import ddp_trainings
import pytest
import torch
from small_runs import start_policy, start_weights
from tiny import unbatched_logprobs

from lit_grpo.types import TrainBatch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory, importer):
    """Return what the two ranks have of each training."""
    directory = tmp_path_factory.mktemp("ddp")
    first = [name for name in ddp_trainings.TRAININGS if name not in ddp_trainings.RESUMED]
    for names in (first, ddp_trainings.RESUMED):
        importer.run(names, directory, num_ranks=2, program="ddp_trainings")
    return {
        name: [torch.load(directory / f"{name}-rank{rank}.pt") for rank in (0, 1)]
        for name in ddp_trainings.TRAININGS
    }


def assert_same_weights(one, other):
    torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)


def test_ranks_that_lack_different_numbers_of_groups_refill_together(results):
    ranks = results["refill"]
    assert ranks[0]["ids"] == [["hard4", "hard8"], ["hard10", "hard11"]]
    assert ranks[1]["ids"] == [["hard2", "hard3"], ["hard12", "hard13"]]
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    assert_same_weights(*ranks)
    metrics = ranks[0]["metrics"][0]
    assert metrics["dynamic_sampling/sampled_per_group"] == (4 + 2 + 1) / 4
    # The threshold of the entropy is that of both ranks together.
    tokens, kept = (sum(int(rank["entropy"][0][i]) for rank in ranks) for i in (0, 1))
    assert kept / tokens == pytest.approx(0.5, abs=0.1)
    assert metrics["policy/masked_fraction"] == pytest.approx(1 - kept / tokens)


@pytest.mark.parametrize("name", ["both-ranks", "one-rank-without-rewards"])
def test_two_ranks_take_the_step_of_the_union_of_their_rollouts(results, name):
    ranks = results[name]
    assert_same_weights(*ranks)
    assert ranks[0]["metrics"] == ranks[1]["metrics"]

    policy, before = start_policy(), start_weights()
    total, num_tokens, advantages = 0.0, 0, []
    for rank in ranks:
        batch = TrainBatch(**rank["batch"])
        num_tokens += int(batch.loss_mask.sum())
        advantages.append(batch.advantages)
        for n in range(batch.num_rows):
            if batch.loss_mask[n].any():
                total = (
                    total
                    + batch.advantages[n] * unbatched_logprobs(policy.model, batch, n)[0].sum()
                )
    (-total / num_tokens).backward()
    for parameter_name, parameter in policy.model.named_parameters():
        step = before[parameter_name] - ranks[0]["weights"][parameter_name]
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=2e-6)

    # The deviation over the batch is that of both ranks together.
    rewards = torch.cat([rank["rewards"] for rank in ranks])
    valid = ~rewards.isnan()
    assert valid[2:].all() == (name == "both-ranks")
    centered = torch.where(valid, rewards - rewards.nanmean(1, keepdim=True), 0.0)
    deviation = rewards[valid].std()
    expected = (centered / deviation).nan_to_num().flatten().float()
    torch.testing.assert_close(torch.cat(advantages), expected)
    assert ranks[0]["metrics"]["reward/mean"] == pytest.approx(rewards.nanmean().item())


def test_two_ranks_take_the_step_towards_the_teacher_and_stop_together_when_one_has_lost_it(
    results,
):
    ranks = results["distillation"]
    assert_same_weights(*ranks)
    for rank in ranks:
        assert "out of memory" in rank["reason"]
        assert rank["step"] == 1

    policy, teacher, before = start_policy(), ddp_trainings.start_teacher(), start_weights()
    total, num_tokens = 0.0, 0
    for rank in ranks:
        batch = TrainBatch(**rank["batch"])
        num_tokens += int(batch.loss_mask.sum())
        for n in range(batch.num_rows):
            ours, _ = unbatched_logprobs(policy.model, batch, n)
            theirs, _ = unbatched_logprobs(teacher.model, batch, n)
            total = total + ((ours - theirs).detach() * ours).sum()
    (total / num_tokens).backward()
    for name, parameter in policy.model.named_parameters():
        step = before[name] - ranks[0]["weights"][name]
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=2e-6)


def test_ranks_wait_and_stop_together_when_one_has_no_scores(results):
    for rank in results["long-outage"]:
        assert "lost on one rank" in rank["reason"]
        assert "4 of the 8 rows (50%)" in rank["reason"]
        assert rank["step"] == 1


@pytest.mark.parametrize("name", ["short-outage", "resumed"])
def test_after_an_outage_on_one_rank_a_run_goes_on_exactly(results, name):
    for undisturbed, rank in zip(results["undisturbed"], results[name], strict=True):
        assert (rank["reason"], rank["step"]) == (None, 3)
        assert_same_weights(rank, undisturbed)


@pytest.mark.parametrize("strategy", ddp_trainings.AHEAD)
def test_each_rank_goes_on_with_what_it_had_sampled_ahead(results, strategy):
    resumed = results[f"resumed-ahead-{strategy}"]
    for whole, rank in zip(results[f"ahead-{strategy}"], resumed, strict=True):
        assert rank["num_generations"] == 1  # of the last of two steps
        assert rank["token_ids"] == whole["token_ids"][2:]
        assert rank["versions"] == whole["versions"][8:] == [{1}] * 4 + [{2}] * 4
        assert_same_weights(rank, whole)
    first, second = resumed
    assert first["token_ids"][0] != second["token_ids"][0]


def test_ranks_roll_back_together_although_one_has_seen_the_trouble(results):
    ranks = results["rollback"]
    assert [rank["num_rollbacks"] for rank in ranks] == [1, 1]
    assert [rank["step"] for rank in ranks] == [5, 5]
    assert_same_weights(*ranks)
    assert all(weight.isfinite().all() for weight in ranks[0]["weights"].values())


def test_what_only_the_first_rank_shows_is_not_found(results):
    for rank in results["health"]:
        assert "equal_rewards" not in rank["num_due"]
        assert "identical_completions" not in rank["num_due"]


def test_two_ranks_with_masters_keep_the_same_bfloat16_weights(results):
    ranks = results["masters"]
    assert_same_weights(*ranks)
    for rank in ranks:
        masters = rank["masters"]
        assert all(one.dtype == torch.float32 for one in masters)
        weights = rank["weights"].values()
        assert all(
            torch.equal(weight, master.bfloat16())
            for weight, master in zip(weights, masters, strict=True)
        )
    assert all(map(torch.equal, ranks[0]["masters"], ranks[1]["masters"]))
