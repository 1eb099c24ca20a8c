"""Loss and gradient against TRL's own `GRPOTrainer._compute_loss`, for everything it supports."""

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
from trl_oracle import trl_gradient, trl_trainer

from lit_grpo.objective import EntropyTerm, KLTerm, Objective, SamplerCorrection
from lit_grpo.objective.entropy import EntropyControl
from lit_grpo.objective.inputs import TokenCounts

LOSS_TYPES = {  # TRL's name -> our surrogate and aggregation
    "grpo": ("clip", "sequence"),
    "bnpo": ("clip", "token"),
    "dr_grpo": ("clip", "constant"),
    "dapo": ("clip", "token"),
    "luspo": ("clip", "sequence_sum"),
    "cispo": ("cispo", "token"),
    "sapo": ("sapo", "sequence"),
    "vespo": ("vespo", "token"),
}
VARIANTS = [
    (loss_type, ratio)
    for loss_type in LOSS_TYPES
    for ratio in ("token", "sequence")
    if (loss_type, ratio) != ("vespo", "sequence")
]

deterministic = settings(derandomize=True, database=None, max_examples=20)
low_bounds, high_bounds = st.floats(0.3, 0.95), st.floats(1.05, 3)
corrections = st.builds(
    SamplerCorrection,
    level=st.sampled_from(["token", "sequence"]),
    outside=st.sampled_from(["truncate", "mask"]),
    min_ratio=st.none() | low_bounds,
    max_ratio=high_bounds,
) | st.builds(
    SamplerCorrection,
    level=st.sampled_from(["token", "sequence"]),
    outside=st.sampled_from(["truncate", "mask"]),
    min_ratio=low_bounds,
    max_ratio=st.none(),
)


def objectives(loss_type: str, ratio: str) -> st.SearchStrategy[Objective]:
    """Everything that TRL can combine with this loss."""
    surrogate, aggregation = LOSS_TYPES[loss_type]
    pairs = st.tuples(st.floats(0.5, 4), st.floats(0.5, 4))
    return st.builds(
        Objective,
        surrogate=st.just(surrogate),
        aggregation=st.just(aggregation),
        ratio=st.just(ratio),
        clip_low=st.floats(0, 0.4),
        clip_high=st.floats(0, 0.4),
        ratio_cap=st.none() | st.floats(1.41, 3) if surrogate == "clip" else st.none(),
        sapo_temperatures=pairs,
        vespo_positive=pairs,
        vespo_negative=pairs,
        kl=st.builds(
            KLTerm,
            coef=st.sampled_from([0.0, 0.3]),
            importance=st.booleans() if ratio == "token" else st.just(False),
        ),
        entropy=st.builds(EntropyTerm, coef=st.sampled_from([0.0, 0.1])),
        sampler_correction=st.none() | corrections,
        off_policy_threshold=st.none() | st.floats(0.01, 0.5),
        top_entropy_fraction=st.sampled_from([1.0, 0.5, 0.2]),
    )


@st.composite
def cases(draw) -> Case:
    return random_case(
        draw(st.integers(0, 10**6)),
        num_rows=draw(st.integers(1, 6)),
        num_tokens=draw(st.integers(1, 7)),
        has_old=draw(st.booleans()),
    )


def prepared(case: Case, objective: Objective) -> Case:
    """Set the masks and logprobs that an update with this objective would set.

    TRL weights the KL by the ratio of the policy over the old one, whatever the sampler was.
    """
    if objective.kl.coef == 0:
        case = replace(case, batch=replace(case.batch, ref_logprobs=None))
    elif objective.kl.importance:
        old = case.batch.old_logprobs
        case = replace(
            case, batch=replace(case.batch, sampler_logprobs=case.logprobs if old is None else old)
        )
    return case.with_entropy_mask(objective.top_entropy_fraction)


def trl_counts(*ranks: Case) -> TokenCounts:
    """TRL's means over sequences count rows without a token."""
    counts = counts_of(*(case.batch for case in ranks))
    return replace(counts, sequences=sum(case.batch.num_rows for case in ranks))


def parts_of(case: Case, num_parts: int) -> list[Case]:
    return [case.select(rows) for rows in torch.arange(case.batch.num_rows).chunk(num_parts)]


def total(gradients: list[Gradient]) -> Gradient:
    """Add up the gradients of consecutive parts of a batch."""
    losses, by_logprobs, by_entropy = zip(*gradients, strict=True)
    return Gradient(sum(losses, torch.tensor(0.0)), torch.cat(by_logprobs), torch.cat(by_entropy))


@pytest.mark.parametrize(("loss_type", "ratio"), VARIANTS)
def test_loss_and_gradient_of_a_batch_are_those_of_trl(loss_type, ratio):
    @deterministic
    @given(cases(), objectives(loss_type, ratio))
    def check(case, objective):
        case = prepared(case, objective)
        counts = trl_counts(case)
        trainer = trl_trainer(loss_type, objective)
        expected = trl_gradient(trainer, case, objective, num_items=counts.tokens)
        assert_same(gradient_of(case, objective, counts), expected)

    check()


def without_entropy(objective: Objective) -> Objective:
    """TRL weighs entropies and takes their quantile micro-batch by micro-batch, we do not."""
    return replace(objective, entropy=EntropyTerm(), top_entropy_fraction=1.0)


@pytest.mark.parametrize("loss_type", sorted(LOSS_TYPES.keys() - {"bnpo"}))
def test_accumulated_micro_batches_of_equal_numbers_of_rows_are_those_of_trl(loss_type):
    @settings(deterministic, max_examples=8)
    @given(st.integers(0, 10**6), objectives(loss_type, "token").map(without_entropy))
    def check(seed, objective):
        case = prepared(random_case(seed, num_rows=6), objective)
        counts = trl_counts(case)
        trainer = trl_trainer(loss_type, objective, accumulation=3)
        parts = parts_of(case, 3)
        trl = [trl_gradient(trainer, p, objective, num_items=counts.tokens) for p in parts]
        assert_same(total([gradient_of(part, objective, counts) for part in parts]), total(trl))

    check()


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_unequal_parts_on_two_processes_are_those_of_trl(loss_type):
    objective = Objective(surrogate=LOSS_TYPES[loss_type][0], kl=KLTerm(coef=0.1))
    case = random_case(3, num_rows=5)
    counts = trl_counts(case)
    trainer = trl_trainer(loss_type, objective, num_processes=2)
    ranks = parts_of(case, 2)
    trl = [trl_gradient(trainer, rank, objective, num_items=counts.tokens) for rank in ranks]
    ours = [gradient_of(rank, objective, counts) for rank in ranks]
    assert_same(total(ours), [mean / 2 for mean in total(trl)])  # processes average theirs


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_local_token_weighs_ranks_as_bnpo_weighs_micro_batches(ratio):
    objective = Objective(aggregation="local_token", ratio=ratio, kl=KLTerm(coef=0.1))
    trainer = trl_trainer("bnpo", objective, accumulation=3)
    parts = parts_of(random_case(4, num_rows=8), 3)
    trl = [trl_gradient(trainer, part, objective, num_items=0) for part in parts]
    counts = [trl_counts(part, *(other for other in parts if other is not part)) for part in parts]
    ours = [gradient_of(part, objective, c) for part, c in zip(parts, counts, strict=True)]
    assert_same(total(ours), total(trl))


def full_case(seed: int) -> Case:
    """Return a case with all tokens in the loss, so that micro-batches have equal counts."""
    case = random_case(seed, num_rows=6)
    return replace(case, batch=replace(case.batch, loss_mask=case.batch.completion_mask))


def test_the_entropy_bonus_of_micro_batches_of_equal_numbers_of_tokens_is_that_of_trl():
    objective = Objective(entropy=EntropyTerm(coef=0.2))
    case = full_case(5)
    counts = trl_counts(case)
    trainer = trl_trainer("dapo", objective, accumulation=3)
    parts = parts_of(case, 3)
    trl = [trl_gradient(trainer, part, objective, num_items=counts.tokens) for part in parts]
    assert_same(total([gradient_of(part, objective, counts) for part in parts]), total(trl))


@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_the_entropy_coefficient_adapts_to_the_entropy_as_in_trl(fraction):
    # Mean entropies of all tokens are about 1.5, of the top three tenths about 2.5.
    term = EntropyTerm(coef=0.1, target=1.5 if fraction == 1 else 2.5, coef_step=0.06, coef_max=0.2)
    objective = Objective(entropy=term, top_entropy_fraction=fraction)
    trainer = trl_trainer("dapo", objective)
    control = EntropyControl(term=term, coef=term.coef)
    applied = []
    for step in range(8):
        case = prepared(random_case(step, num_rows=4), objective)
        counts = trl_counts(case)
        now = replace(objective, entropy=EntropyTerm(coef=control.applied_coef))
        expected = trl_gradient(trainer, case, objective, num_items=counts.tokens)
        assert_same(gradient_of(case, now, counts), expected)
        applied.append(control.applied_coef)
        kept = case.batch.loss_mask if fraction == 1 else case.batch.entropy_mask
        control = control.after_step(case.entropy[kept].mean().item())
        assert control.coef == pytest.approx(trainer.entropy_coef)
    assert len(set(applied)) >= 3  # 0 above the target, otherwise values that rise and fall


def test_a_row_without_tokens_counts_as_a_sequence_only_in_trl():
    case, objective = full_case(6), Objective(aggregation="sequence")
    case.batch.loss_mask[:2] = False  # of six rows
    trl = trl_gradient(trl_trainer("grpo", objective), case, objective, num_items=0)
    ours = gradient_of(case, objective, counts_of(case.batch))
    assert_same(ours, [value * 6 / 4 for value in trl])


def test_trl_divides_by_the_tokens_of_an_average_optimizer_step_of_a_generation():
    objective = Objective()
    steps = parts_of(random_case(7, num_rows=6), 2)
    num_items = [trl_counts(step).tokens for step in steps]
    trainer = trl_trainer("dapo", objective)
    trainer.args.steps_per_generation = 2
    for step, tokens in zip(steps, num_items, strict=True):
        trl = trl_gradient(trainer, step, objective, num_items=sum(num_items))
        average = sum(num_items) / 2
        ours = gradient_of(step, objective, trl_counts(step))
        assert_same(ours, [value * average / tokens for value in trl])
