"""Properties of every objective: the order, padding and split of rows change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import (
    Case,
    Gradient,
    assert_same,
    counts_of,
    double_precision,  # noqa: F401 - a fixture
    gradient_of,
    random_case,
)
from torch import Tensor

from lit_grpo.objective import EntropyTerm, KLTerm, Objective, SamplerCorrection
from lit_grpo.objective.aggregations import AGGREGATIONS
from lit_grpo.objective.corrections import LEVELS, OUTSIDE
from lit_grpo.objective.kl import KL_ESTIMATORS
from lit_grpo.objective.ratios import RATIOS
from lit_grpo.objective.surrogates import SURROGATES

NUM_ROWS = 5
RATIO_OF = [
    (s, r) for s in SURROGATES for r in RATIOS if r == "token" or s not in ("gmpo", "vespo", "dppo")
]

KL_TERMS = [
    KLTerm(coef=0.3, estimator=estimator, gradient=gradient, importance=importance)
    for estimator in KL_ESTIMATORS
    for gradient in ("estimator", "k2")
    for importance in (False, True)
    if not (estimator == "k2" and gradient == "estimator" and importance)
]

for_every_surrogate = pytest.mark.parametrize(("surrogate", "ratio"), RATIO_OF)
deterministic = settings(derandomize=True, database=None, max_examples=15)

seeds = st.integers(0, 10**6)


def corrections(surrogate: str) -> st.SearchStrategy[SamplerCorrection]:
    levels = sorted(LEVELS.keys() - ({"geometric"} if surrogate == "vespo" else set()))
    return st.builds(
        SamplerCorrection,
        level=st.sampled_from(levels),
        outside=st.sampled_from(sorted(OUTSIDE)),
        min_ratio=st.none() | st.floats(0.3, 0.95),
        max_ratio=st.none() | st.floats(1.05, 3),
    )


def objectives(surrogate: str, ratio: str, **fixed: object) -> st.SearchStrategy[Objective]:
    """Draw all settings of an objective that are not fixed."""
    choices = {
        "clip_low": st.floats(0, 0.4),
        "clip_high": st.floats(0, 0.4),
        "ratio_cap": st.none() | st.floats(1.41, 3) if surrogate == "clip" else st.none(),
        "aggregation": st.sampled_from(sorted(AGGREGATIONS)),
        "kl": st.sampled_from(KL_TERMS),
        "entropy": st.builds(EntropyTerm, coef=st.sampled_from([0.0, 0.1])),
        "sampler_correction": st.none() | corrections(surrogate),
        "off_policy_threshold": st.none() | st.floats(0.01, 0.5),
        "top_entropy_fraction": st.sampled_from([1.0, 0.4]),
    }
    given_fields = {name: st.just(value) for name, value in fixed.items()}
    fields = choices | given_fields | {"surrogate": st.just(surrogate), "ratio": st.just(ratio)}
    return st.builds(Objective, **fields)


def case_for(seed: int, objective: Objective) -> Case:
    """Return a random case with one row that has no tokens."""
    case = random_case(seed, num_rows=NUM_ROWS, has_old=seed % 3 > 0, has_ref=seed % 4 > 0)
    case.batch.loss_mask[seed % NUM_ROWS] = False
    return case.with_entropy_mask(objective.top_entropy_fraction)


def whole(case: Case, objective: Objective) -> Gradient:
    return gradient_of(case, objective, counts_of(case.batch))


@st.composite
def partitions(draw: st.DrawFn) -> list[Tensor]:
    """Draw a permutation of the rows, cut into one to ``NUM_ROWS`` parts."""
    order = torch.tensor(draw(st.permutations(range(NUM_ROWS))))
    cuts = draw(st.sets(st.integers(1, NUM_ROWS - 1)))
    return list(order.tensor_split(sorted(cuts)))


def joined(parts: list[tuple[Tensor, Gradient]]) -> Gradient:
    """Return the gradient of the whole batch from those of its parts."""
    order = torch.cat([rows for rows, _ in parts]).argsort()
    losses, by_logprobs, by_entropy = zip(*(gradient for _, gradient in parts), strict=True)
    loss = torch.stack(losses).sum()
    return Gradient(loss, torch.cat(by_logprobs)[order], torch.cat(by_entropy)[order])


@for_every_surrogate
def test_order_of_rows_and_split_into_micro_batches_change_nothing(surrogate, ratio):
    @deterministic
    @given(seeds, objectives(surrogate, ratio), partitions())
    def check(seed, objective, parts):
        case = case_for(seed, objective)
        counts = counts_of(case.batch)
        split = [(rows, gradient_of(case.select(rows), objective, counts)) for rows in parts]
        assert_same(joined(split), whole(case, objective))

    check()


@for_every_surrogate
def test_split_over_ranks_and_their_micro_batches_changes_nothing(surrogate, ratio):
    every_one = st.sampled_from(sorted(AGGREGATIONS.keys() - {"local_token"}))

    @deterministic
    @given(seeds, objectives(surrogate, ratio), every_one, partitions())
    def check(seed, objective, aggregation, parts):
        objective = replace(objective, aggregation=aggregation)
        case = case_for(seed, objective)
        ranks = [case.select(rows).batch for rows in parts]
        split = []
        for number, rows in enumerate(parts):
            counts = counts_of(ranks[number], *ranks[:number], *ranks[number + 1 :])
            micro_batches = [part for part in rows.tensor_split(2) if len(part)]
            split += [(m, gradient_of(case.select(m), objective, counts)) for m in micro_batches]
        assert_same(joined(split), whole(case, objective))

    check()


@for_every_surrogate
def test_local_token_gives_each_of_two_ranks_half_of_its_own_gradient(surrogate, ratio):
    @settings(deterministic, max_examples=5)
    @given(seeds, objectives(surrogate, ratio, aggregation="local_token", entropy=EntropyTerm()))
    def check(seed, objective):
        case = case_for(seed, objective)
        here, there = (case.select(rows) for rows in torch.arange(NUM_ROWS).chunk(2))
        share = gradient_of(here, objective, counts_of(here.batch, there.batch))
        assert_same(share, [value / 2 for value in whole(here, objective)])

    check()


def padded(case: Case, num_columns: int, seed: int) -> Case:
    """Add columns of padding on the right, filled with arbitrary values."""
    generator = torch.Generator().manual_seed(seed)

    def pad(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        new = torch.randn(len(tensor), num_columns, generator=generator) * 5
        is_number = tensor.dtype == torch.float64
        return torch.cat([tensor, new if is_number else torch.zeros_like(new).to(tensor)], 1)

    names = [
        *("completion_ids", "completion_mask", "loss_mask", "entropy_mask"),
        *("sampler_logprobs", "old_logprobs", "ref_logprobs"),
    ]
    batch = replace(case.batch, **{name: pad(getattr(case.batch, name)) for name in names})
    return Case(logprobs=pad(case.logprobs), entropy=pad(case.entropy), batch=batch)


@for_every_surrogate
def test_padding_changes_nothing_and_has_no_gradient(surrogate, ratio):
    @deterministic
    @given(seeds, objectives(surrogate, ratio), st.integers(1, 4))
    def check(seed, objective, num_columns):
        case = case_for(seed, objective)
        short, long = (whole(c, objective) for c in (case, padded(case, num_columns, seed)))
        zeros = torch.zeros(NUM_ROWS, num_columns)
        expected = [torch.cat([tensor, zeros], 1) for tensor in short[1:]]
        assert_same(long, [short.loss, *expected])

    check()


@for_every_surrogate
def test_tokens_outside_the_loss_mask_have_exactly_no_gradient(surrogate, ratio):
    @deterministic
    @given(seeds, objectives(surrogate, ratio))
    def check(seed, objective):
        case = case_for(seed, objective)
        _, by_logprobs, by_entropy = whole(case, objective)
        outside = ~case.batch.loss_mask
        assert by_logprobs[outside].eq(0).all()
        assert by_entropy[outside].eq(0).all()

    check()


@for_every_surrogate
def test_if_policy_and_sampler_agree_every_gradient_is_that_of_reinforce(surrogate, ratio):
    @deterministic
    @given(seeds, objectives(surrogate, ratio, entropy=EntropyTerm(), top_entropy_fraction=1.0))
    def check(seed, objective):
        case = random_case(seed, has_old=False, has_ref=False)
        case = replace(case, batch=replace(case.batch, sampler_logprobs=case.logprobs))
        counts = counts_of(case.batch)
        weights = AGGREGATIONS[objective.aggregation](case.batch.loss_mask, counts)
        expected = -case.batch.advantages[:, None] * weights * (surrogate != "none")
        assert_same([gradient_of(case, objective, counts).logprobs], [expected])

    check()
