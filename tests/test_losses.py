import math
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch

from lit_grpo.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    SURROGATES,
    Objective,
    TokenCounts,
    by_constant,
    by_sequence,
    by_token,
    clip,
    k1,
    k2,
    k3,
    token_losses,
)
from lit_grpo.types import TrainBatch


def batch(advantages, *, mask, **fields) -> TrainBatch:
    mask = torch.tensor(mask, dtype=torch.bool)
    fields = {name: torch.tensor(value) for name, value in fields.items()}
    return TrainBatch(
        prompt_ids=torch.zeros(1, 1, dtype=torch.long),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        prompt_index=torch.zeros(len(mask), dtype=torch.long),
        completion_ids=torch.zeros(mask.shape, dtype=torch.long),
        completion_mask=mask,
        loss_mask=mask,
        advantages=torch.tensor(advantages),
        **({"sampler_logprobs": torch.zeros(mask.shape)} | fields),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.56),  # held at 1.28
        (0.5, 2.0, -1.0),  # the pessimistic bound does not help a fallen ratio
        (0.5, -2.0, 1.6),  # held at 0.8
        (1.5, -2.0, 3.0),
    ],
)
def test_clip_takes_the_pessimistic_side(ratio, advantage, expected):
    objective = Objective(clip_low=0.2, clip_high=0.28)
    loss = clip(torch.tensor([[ratio]]), torch.tensor([[advantage]]), objective)
    assert loss.item() == pytest.approx(expected)


def test_kl_estimators_match_their_formulas():
    logprobs, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(logprobs, ref).item() == pytest.approx(math.log(2))
    assert k2(logprobs, ref).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(logprobs, ref).item() == pytest.approx(0.5 + math.log(2) - 1)


def test_k1_and_k3_are_unbiased_for_the_divergence():
    pi, ref = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    divergence = (pi * (pi / ref).log()).sum().item()
    for estimator in (k1, k3):
        assert (pi * estimator(pi.log(), ref.log())).sum().item() == pytest.approx(divergence)


def test_aggregations_weigh_tokens_as_their_papers_say():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    counts = TokenCounts(tokens=4, sequences=2, max_tokens=5)
    assert by_token(mask, counts).tolist() == [[0.25] * 3, [0.25, 0, 0]]
    sixth = pytest.approx(1 / 6)
    assert by_sequence(mask, counts).tolist() == [[sixth] * 3, [0.5, 0, 0]]
    tenth = pytest.approx(0.1)
    assert by_constant(mask, counts).tolist() == [[tenth] * 3, [tenth, 0, 0]]


def test_tables_and_config_choices_agree():
    hints = get_type_hints(Objective)
    assert set(get_args(hints["surrogate"])) == SURROGATES.keys()
    assert set(get_args(hints["kl"])) == KL_ESTIMATORS.keys()
    assert set(get_args(hints["aggregation"])) == AGGREGATIONS.keys()


def test_at_ratio_one_the_gradient_is_that_of_reinforce():
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
    data = batch([2.0, -1.0], mask=[[1, 1], [1, 0]], sampler_logprobs=[[-1.0, -2.0], [-0.5, 0.0]])
    losses = token_losses(logprobs, torch.zeros(2, 2), data, Objective())
    weights = by_token(data.loss_mask, TokenCounts(tokens=3, sequences=2, max_tokens=2))
    (losses.total * weights).sum().backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([-2 / 3, -2 / 3, 1 / 3, 0])


def test_old_logprobs_make_the_ratio_and_the_clip_fractions():
    logprobs = torch.tensor([[math.log(0.6), math.log(0.6)]])
    data = batch([1.0], mask=[[1, 1]], old_logprobs=[[math.log(0.4), math.log(0.6)]])
    losses = token_losses(logprobs, torch.zeros(1, 2), data, Objective(sampler_ratio_cap=None))
    assert losses.ratio.tolist()[0] == pytest.approx([1.5, 1.0])
    assert losses.surrogate.tolist()[0] == pytest.approx([-1.2, -1.0])
    assert losses.clipped_high.tolist() == [[True, False]]
    assert not losses.clipped_low.any()


def test_sampler_ratio_multiplies_the_surrogate_up_to_its_cap():
    logprobs = torch.tensor([[math.log(0.6), math.log(0.9)]])
    data = batch([1.0], mask=[[1, 1]], sampler_logprobs=[[math.log(0.4), math.log(0.1)]])
    capped = token_losses(logprobs, torch.zeros(1, 2), data, Objective(sampler_ratio_cap=2.0))
    assert capped.surrogate.tolist()[0] == pytest.approx([-1.5, -2.0])
    plain = token_losses(logprobs, torch.zeros(1, 2), data, Objective(sampler_ratio_cap=None))
    assert plain.surrogate.tolist()[0] == pytest.approx([-1.0, -1.0])


def test_kl_and_entropy_enter_with_their_coefficients():
    logprobs = torch.tensor([[math.log(0.5)]])
    data = batch([0.0], mask=[[1]], ref_logprobs=[[math.log(0.25)]])
    objective = Objective(kl="k2", kl_coef=0.1, entropy_coef=0.01)
    losses = token_losses(logprobs, torch.tensor([[3.0]]), data, objective)
    assert losses.total.item() == pytest.approx(0.1 * math.log(2) ** 2 / 2 - 0.03)


@pytest.mark.parametrize(
    ("setting", "value"), [("clip_low", 1.5), ("clip_high", -0.1), ("kl_coef", -1.0)]
)
def test_impossible_bounds_are_refused_with_the_key_to_set(setting, value):
    with pytest.raises(ValueError, match=f"Set model.objective.{setting[:4]}"):
        replace(Objective(), **{setting: value})
