"""Surrogates against hand-computed values and the formulas of their papers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import counts_of, train_batch

from lit_grpo.objective import LossInputs, Objective, SamplerCorrection
from lit_grpo.objective.corrections import sampler_weights
from lit_grpo.objective.ratios import RATIOS, bounded
from lit_grpo.objective.surrogates import SURROGATES


def loss_inputs(objective, log_ratio, logprobs, advantage, mask, correction) -> LossInputs:
    """Return the inputs for one sequence."""
    mask = torch.ones_like(log_ratio).bool() if mask is None else torch.tensor([mask]).bool()
    batch = train_batch([advantage], mask)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=(logprobs - log_ratio).detach(),
        log_ratio=log_ratio,
        ratio=RATIOS[objective.ratio](log_ratio, mask),
        advantages=torch.tensor([[advantage]], dtype=torch.float64),
        mask=mask,
        correction=torch.atleast_2d(torch.tensor(correction, dtype=torch.float64)),
        entropy=torch.zeros_like(logprobs),
        batch=batch,
        counts=counts_of(batch),
    )


def surrogate(objective, log_ratios, advantage, *, logprobs=None, correction=1.0, mask=None):
    """Return the losses of one sequence: [C], or [1] for a loss per sequence."""
    log_ratio = bounded(torch.tensor([log_ratios], dtype=torch.float64))
    logprobs = log_ratio if logprobs is None else logprobs
    inputs = loss_inputs(objective, log_ratio, logprobs, advantage, mask, correction)
    return SURROGATES[objective.surrogate](inputs, objective)[0].tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.56),  # clipped at 1.28
        (0.5, 2.0, -1.0),  # not clipped, since that would lower the loss
        (0.5, -2.0, 1.6),  # clipped at 0.8
        (1.5, -2.0, 3.0),
        (9.0, -2.0, 6.0),  # capped at 3
    ],
)
def test_clip_takes_the_larger_loss(ratio, advantage, expected):
    objective = Objective(clip_low=0.2, clip_high=0.28, ratio_cap=3.0)
    assert surrogate(objective, [math.log(ratio)], advantage) == pytest.approx([expected])


def dual_clip(ratio: float, advantage: float, low: float, high: float, bound: float) -> float:
    """The objective of arXiv 1912.09729 equation 5, to be maximised."""
    clipped = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return max(clipped, bound * advantage) if advantage < 0 else clipped


@settings(derandomize=True, database=None, max_examples=200)
@given(
    log_ratio=st.floats(-3, 3),
    advantage=st.floats(-3, 3),
    low=st.floats(0, 0.5),
    high=st.floats(0, 0.5),
    above=st.floats(0.01, 5),
)
def test_ratio_cap_is_the_bound_of_dual_clip(log_ratio, advantage, low, high, above):
    cap = 1 + high + above
    objective = Objective(clip_low=low, clip_high=high, ratio_cap=cap)
    expected = -dual_clip(math.exp(log_ratio), advantage, low, high, cap)
    assert surrogate(objective, [log_ratio], advantage) == pytest.approx([expected])


def test_gspo_clips_the_geometric_mean_of_the_masked_tokens():
    ratios = [math.log(2), 5.0, math.log(8)]
    mask = [1, 0, 1]
    gspo = Objective(ratio="sequence", clip_low=3e-4, clip_high=4e-4)
    assert surrogate(gspo, ratios, 1.0, mask=mask) == pytest.approx([-1.0004])
    assert surrogate(gspo, ratios, -1.0, mask=mask) == pytest.approx([4.0])
    fallen = [-ratio for ratio in ratios]
    assert surrogate(gspo, fallen, 1.0, mask=mask) == pytest.approx([-0.25])
    assert surrogate(gspo, fallen, -1.0, mask=mask) == pytest.approx([0.9997])


def test_gspo_of_one_token_uses_the_ratio_of_that_token():
    gspo = Objective(ratio="sequence")
    assert surrogate(gspo, [9.0, math.log(2)], -1.0, mask=[0, 1]) == pytest.approx([2.0])


def test_cispo_bounds_the_weight_and_keeps_the_gradient_of_every_token():
    logprobs = torch.tensor([[-2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    objective = Objective(surrogate="cispo", clip_high=1.0)
    log_ratio = torch.tensor([[5.0, 0.1]], dtype=torch.float64).log()
    inputs = loss_inputs(objective, log_ratio, logprobs, 3.0, None, [0.5, 1.0])
    losses = SURROGATES["cispo"](inputs, objective)
    assert losses.tolist()[0] == pytest.approx([2 * 3 * 2 * 0.5, 0.1 * 3 * 3])
    losses.sum().backward()
    assert logprobs.grad.tolist()[0] == pytest.approx([-2 * 3 * 0.5, -0.1 * 3])


@pytest.mark.parametrize(("advantage", "temperature"), [(2.0, 0.5), (-2.0, 4.0)])
def test_sapo_uses_the_temperature_for_the_sign_of_the_advantage(advantage, temperature):
    objective = Objective(surrogate="sapo", sapo_temperatures=(0.5, 4.0))
    gate = 4 / temperature / (1 + math.exp(-temperature * (3 - 1)))
    assert surrogate(objective, [math.log(3)], advantage) == pytest.approx([-gate * advantage])


def geometric_mean_of_clipped(log_ratios, advantage, low, high) -> float:
    """arXiv 2507.20673 equation 4 for one sequence, as a product of its tokens' minima."""
    product = 1.0
    for log_ratio in log_ratios:
        ratio = math.exp(log_ratio)
        clipped = min(max(ratio, math.exp(-low)), math.exp(high))
        product *= abs(min(ratio * advantage, clipped * advantage)) / abs(advantage)
    return product ** (1 / len(log_ratios)) * advantage


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(advantage):
    log_ratios = [0.9, -0.3, 0.1, -0.8]
    objective = Objective(surrogate="gmpo", clip_low=0.4, clip_high=0.2)
    expected = -geometric_mean_of_clipped(log_ratios, advantage, 0.4, 0.2)
    assert surrogate(objective, log_ratios, advantage) == pytest.approx([expected])


def test_gmpo_applies_the_mean_correction_of_its_tokens():
    # Log ratios 0.2 (clipped) and -0.3 have mean -0.05; corrections 2 and 1 have mean 1.5.
    objective = Objective(surrogate="gmpo", clip_high=0.2)
    losses = surrogate(
        objective, [0.9, -0.3, 7.0], 2.0, correction=[2.0, 1.0, 50.0], mask=[1, 1, 0]
    )
    assert losses == pytest.approx([-math.exp(-0.05) * 2 * 1.5])


def test_gmpo_and_a_geometric_correction_are_one_geometric_mean():
    log_ratios, sampler_log_ratios = [0.1, -0.3, 0.05], [0.2, -0.1, 0.4]
    correction = sampler_weights(
        torch.tensor([sampler_log_ratios], dtype=torch.float64),
        torch.ones(1, 3, dtype=torch.bool),
        SamplerCorrection(level="geometric", max_ratio=None),
    )
    objective = Objective(surrogate="gmpo", clip_high=0.4, clip_low=0.4)
    losses = surrogate(objective, log_ratios, 2.0, correction=correction[0].tolist())
    product = math.prod(map(math.exp, log_ratios + sampler_log_ratios))
    assert losses == pytest.approx([-2.0 * product ** (1 / 3)])


@pytest.mark.parametrize(("advantage", "k", "rate"), [(2.0, 2.0, 3.0), (-2.0, 0.5, 1.5)])
def test_vespo_weighs_reinforce_by_the_gamma_weight_of_the_whole_sequence(advantage, k, rate):
    objective = Objective(surrogate="vespo", vespo_positive=(2.0, 3.0), vespo_negative=(0.5, 1.5))
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
    losses = surrogate(
        objective,
        [0.3, -0.1, 9.0],
        advantage,
        logprobs=logprobs,
        correction=[1.5, 0.5, 50.0],
        mask=[1, 1, 0],
    )
    w = math.exp(0.3 - 0.1) * 1.5 * 0.5
    weight = math.exp(rate) * w**k * math.exp(-rate * w)
    assert losses[:2] == pytest.approx([weight * advantage, weight * advantage * 2])


def test_vespo_gives_a_sequence_with_a_masked_token_a_tiny_weight():
    objective = Objective(surrogate="vespo")
    logprobs = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    losses = surrogate(objective, [0.0, 0.0], 1.0, logprobs=logprobs, correction=[0.0, 1.0])
    assert losses == pytest.approx([0.0, 0.0], abs=1e-12)  # w = 1e-8, squared


def test_vespo_bounds_the_log_weights_of_tokens_and_of_the_sequence():
    objective = Objective(surrogate="vespo", vespo_positive=(0.01, 1.0))
    logprobs = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    token = surrogate(objective, [50.0, -20.0], 1.0, logprobs=logprobs)  # 50 counts as 20
    assert token == pytest.approx([1.0, 1.0])
    sequence = surrogate(objective, [-15.0, -15.0], 1.0, logprobs=logprobs)  # -30 as log 1e-8
    assert sequence == pytest.approx([math.e * 1e-8**0.01] * 2)
