"""Tokens that are chosen by their covariance, in a rollout step and over ranks."""

import statistics
from functools import partial

import pytest
import torch
from forked import run_in_processes
from loss_batches import Case, random_case
from small_runs import assert_same_runs, fit, make_module, weights

from lit_grpo.objective import CovarianceTerm, Objective
from lit_grpo.training.token_selection import select_tokens


def tokens_of(case: Case) -> dict[tuple[int, int], float]:
    """Return the part of each trained token in the covariance, by row and position."""
    batch = case.batch
    places = [tuple(place) for place in batch.loss_mask.nonzero().tolist()]
    logprobs = [batch.old_logprobs[place].item() for place in places]
    advantages = [batch.advantages[n].item() for n, _ in places]
    means = statistics.mean(logprobs), statistics.mean(advantages)
    return {
        place: (logprob - means[0]) * (advantage - means[1])
        for place, logprob, advantage in zip(places, logprobs, advantages, strict=True)
    }


def chosen_in(case: Case, term: CovarianceTerm, seed: int = 0) -> set[tuple[int, int]]:
    batch = select_tokens(case.batch, case.entropy, Objective(covariance=term), seed)
    return {tuple(place) for place in batch.covariance_mask.nonzero().tolist()}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("fraction", [1e-4, 0.2, 1.0])
def test_kl_cov_takes_the_tokens_of_the_highest_covariance(fraction, seed):
    case = random_case(seed, num_rows=8, num_tokens=9)
    values = tokens_of(case)
    count = max(1, int(fraction * len(values)))
    expected = set(sorted(values, key=lambda place: -values[place])[:count])
    assert chosen_in(case, CovarianceTerm(action="kl", fraction=fraction)) == expected


def test_clip_cov_draws_from_the_tokens_between_the_bounds():
    case = random_case(5, num_rows=8, num_tokens=9)
    values = tokens_of(case)
    candidates = {place for place, value in values.items() if 0.05 < value < 0.5}
    count = int(0.1 * len(values))
    assert len(candidates) > count > 1
    draws = [
        chosen_in(case, CovarianceTerm(fraction=0.1, low=0.05, high=0.5), seed)
        for seed in range(60)
    ]
    assert {len(draw) for draw in draws} == {count}
    assert set().union(*draws) == candidates
    again = chosen_in(case, CovarianceTerm(fraction=0.1, low=0.05, high=0.5), seed=0)
    assert again == draws[0]


def test_clip_cov_takes_all_tokens_between_the_bounds_if_they_are_few_and_none_if_there_are_none():
    case = random_case(5, num_rows=8, num_tokens=9)
    candidates = {place for place, value in tokens_of(case).items() if 0.05 < value < 0.5}
    assert chosen_in(case, CovarianceTerm(fraction=1.0, low=0.05, high=0.5)) == candidates
    assert chosen_in(case, CovarianceTerm(fraction=1.0, low=1e5, high=1e6)) == set()


def select_on_rank(store, rank):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    try:
        case = random_case(3, num_rows=8, num_tokens=9)
        own = case.select(torch.arange(4) + 4 * rank)
        return chosen_in(own, CovarianceTerm(action="kl", fraction=0.2))
    finally:
        torch.distributed.destroy_process_group()


def test_the_tokens_of_all_ranks_are_compared(tmp_path):
    first, second = run_in_processes(
        *(partial(select_on_rank, tmp_path / "store", rank) for rank in (0, 1))
    )
    case = random_case(3, num_rows=8, num_tokens=9)
    whole = chosen_in(case, CovarianceTerm(action="kl", fraction=0.2))
    assert first | {(n + 4, t) for n, t in second} == whole
    assert 0 < len(first) < len(whole)


@pytest.mark.parametrize("action", ["clip", "kl"])
def test_the_gradient_is_the_same_for_any_split_into_micro_batches(action):
    term = CovarianceTerm(action=action, fraction=0.3, low=0.0, high=100.0)
    runs = []
    for max_tokens in (1, 60, 100_000):
        update = {"minibatches": 2, "max_tokens_per_micro_batch": max_tokens}
        module = make_module(objective=Objective(covariance=term), update=update)
        outputs = fit(module, max_steps=2)
        assert outputs[-1]["batch"].covariance_mask.any()
        runs.append((weights(module), outputs[-1]["metrics"]))
    assert_same_runs(runs, rtol=1e-4, atol=1e-6, metrics_atol=1e-4)
