"""A user's own functions: they get what ours get, and what they return is checked."""

import re
from dataclasses import dataclass, field, replace

import pytest
import torch
from loss_batches import (  # noqa: F401 - the fixture applies by its import
    assert_same,
    counts_of,
    differentiate,
    double_precision,
    gradient_of,
    losses_of,
    random_case,
)
from tiny import rollouts

from lit_grpo.objective import AdvantageConfig, Objective, SamplerCorrection
from lit_grpo.objective.advantages import compute_advantages
from lit_grpo.objective.aggregations import by_token
from lit_grpo.objective.corrections import LEVELS
from lit_grpo.objective.surrogates import clip, gmpo
from lit_grpo.types import UserCodeFailed, UserError


@pytest.fixture
def case():
    return random_case(7)


def gradient(case, **settings):
    return gradient_of(case, Objective(**settings), counts_of(case.batch))


def own_clip(inputs, objective):
    return clip(inputs, objective)


def own_gmpo(inputs, objective):
    return gmpo(inputs, objective)


@pytest.mark.parametrize(("own", "name"), [(own_clip, "clip"), (own_gmpo, "gmpo")])
def test_an_own_surrogate_that_is_ours_has_our_gradient(case, own, name):
    """One loss per token, and one per sequence."""
    ours = gradient(case, surrogate=name)
    assert_same(gradient(case, surrogate=own), ours)


def test_an_own_level_makes_the_logarithms_of_the_weights(case):
    def geometric(log_ratio, mask):
        return (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)

    own, ours = (
        Objective(sampler_correction=SamplerCorrection(level=level))
        for level in (geometric, "geometric")
    )
    assert "geometric" in LEVELS
    assert_same(
        gradient_of(case, own, counts_of(case.batch)),
        gradient_of(case, ours, counts_of(case.batch)),
    )


def test_an_own_loss_replaces_all_terms_and_logs_its_metrics(case):
    """Here the likelihood of the sampler's tokens, a mean over the minibatch."""

    def likelihood(inputs, objective):
        inputs.metrics["likelihood"] = inputs.logprobs.detach().exp()
        return -(inputs.logprobs * by_token(inputs.mask, inputs.counts)).sum()

    objective = Objective(function=likelihood)
    mask = case.batch.loss_mask
    expected = differentiate(case, lambda logprobs, _: -logprobs[mask].mean())
    assert_same(gradient_of(case, objective, counts_of(case.batch)), expected)
    losses = losses_of(case.logprobs, case.batch, objective)
    assert losses.own_metrics["likelihood"].equal(case.logprobs.exp())


def logs(value):
    def own(inputs, objective):
        inputs.metrics["mine"] = value(inputs)
        return -inputs.ratio * inputs.advantages

    return own


@pytest.mark.parametrize(
    "value",
    [
        lambda inputs: inputs.ratio,
        lambda inputs: inputs.ratio[:, :1],
        lambda inputs: inputs.ratio.mean(),
        lambda inputs: inputs.ratio.mean().item(),
        lambda inputs: 2,
    ],
)
def test_an_own_metric_has_a_value_per_token_one_per_sequence_or_one(case, value):
    losses = losses_of(case.logprobs, case.batch, Objective(surrogate=logs(value)))
    mine = losses.own_metrics["mine"]
    assert not mine.requires_grad
    assert (mine * case.batch.loss_mask).shape == case.batch.loss_mask.shape


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (lambda inputs: inputs.ratio[:, 0], r"\(\d+,\)"),
        (lambda inputs: inputs.ratio[0], r"\(\d+,\)"),
        (lambda inputs: "0.5", "str"),
        (lambda inputs: None, "NoneType"),
    ],
)
def test_an_own_metric_of_another_shape_is_named(case, value, got):
    expected = rf"inputs\.metrics\['mine'\] must be a number or a tensor of shape .* got {got}"
    with pytest.raises(UserError, match=expected):
        losses_of(case.logprobs, case.batch, Objective(surrogate=logs(value)))


def test_own_advantages_replace_baseline_and_deviation():
    def squared(table):
        assert table.weights == {"task": 1.0}
        assert table.lengths.shape == table.rewards.shape
        return (table.rewards**2).float()

    table = rollouts([[1.0, 2.0, 3.0]]).reward_table({"task": 1.0})
    found = compute_advantages(table, AdvantageConfig(function=squared))
    assert found.tolist() == [[1.0, 4.0, 9.0]]
    assert found.dtype == torch.float64


def returns(value):
    """Return a function that ignores what it gets."""

    def own(*args):
        return value

    return own


NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "got NoneType None."),
        (torch.zeros(5), "got shape (5,)."),
        (torch.zeros(5, 6, dtype=torch.long), "of floating point numbers, got torch.int64."),
        (
            torch.full((5, 6), NAN, requires_grad=True),
            "all finite, got 30 of 30 values that are NaN or infinite.",
        ),
    ],
)
@pytest.mark.parametrize("part", ["surrogate", "level"])
def test_a_wrong_result_is_named_with_the_function_its_file_and_what_was_expected(
    case, part, value, problem
):
    own = returns(value)
    if part == "surrogate":
        objective, what = Objective(surrogate=own), "a loss per token or per sequence"
    else:
        correction = SamplerCorrection(level=own)
        objective = Objective(sampler_correction=correction)
        what = "a logarithm per token or sequence"
    with pytest.raises(UserError) as error:
        gradient_of(case, objective, counts_of(case.batch))
    message = str(error.value)
    name = r"test_custom\.returns\.<locals>\.own \(.*test_custom\.py:\d+\)"
    rule = rf"\S*{name} must return {what}, "
    assert re.match(rule + r"a tensor of shape \(5, 6\) or \(5, 1\), ", message), message
    assert problem in message


class Takes:
    def __call__(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("make", "own", "said"),
    [
        (
            lambda own: Objective(surrogate=own),
            lambda inputs: inputs,
            r"objective\.surrogate must be a function of inputs and objective, got .*<lambda> "
            r"\(.*test_custom\.py:\d+\), which takes \(inputs\)",
        ),
        (
            lambda own: Objective(function=own),
            Takes(),
            r"objective\.function must .*Takes\.__call__ .*takes \(inputs\).*"
            r"def __call__\(self, inputs, objective\), or set another model\.objective\.function\.",
        ),
        (
            lambda own: SamplerCorrection(level=own),
            lambda log_ratio, *, mask: log_ratio,
            r"level must be a function of log_ratio and mask, .*takes \(log_ratio, \*, mask\)",
        ),
        (
            lambda own: AdvantageConfig(function=own),
            lambda rewards, lengths: rewards,
            r"advantage\.function must be a function of table, .*takes \(rewards, lengths\)",
        ),
    ],
    ids=["surrogate", "loss", "level", "advantages"],
)
def test_a_function_that_does_not_take_what_it_is_called_with_is_refused(make, own, said):
    with pytest.raises(UserError, match=said):
        make(own)


def test_further_arguments_with_a_default_are_fine(case):
    def own(inputs, objective, bound=2.0):
        return clip(inputs, objective)

    assert_same(gradient(case, surrogate=own), gradient(case, surrogate="clip"))


def test_an_exception_is_reported_from_the_users_line_on(case):
    def own(inputs, objective):
        return inputs.no_such_field

    with pytest.raises(UserCodeFailed) as failure:
        gradient(case, surrogate=own)
    first, second, *lines = str(failure.value).splitlines()
    assert first.startswith(f"{__name__}.test_an_exception")
    assert first.endswith(" failed:")
    assert f"({__file__}:{own.__code__.co_firstlineno})" in first
    assert second == "Traceback (most recent call last):"
    assert lines[0].startswith(f'  File "{__file__}", line {own.__code__.co_firstlineno + 1}')
    assert lines[-1] == "AttributeError: 'LossInputs' object has no attribute 'no_such_field'"


def test_a_loss_that_is_no_scalar_and_advantages_of_another_shape_are_refused(case):
    with pytest.raises(UserError, match=r"must return the loss of the micro-batch.*\(5, 6\)"):
        gradient(case, function=returns(torch.zeros(5, 6)))
    table = rollouts([[1.0, 2.0, 3.0]]).reward_table({"task": 1.0})
    config = AdvantageConfig(function=returns(torch.zeros(3)))
    with pytest.raises(UserError, match=r"one advantage per completion.*\(1, 3\), got shape \(3,"):
        compute_advantages(table, config)


def test_a_result_without_a_gradient_is_refused(case):
    def detached(inputs, objective):
        return -(inputs.ratio * inputs.advantages).detach()

    def constant(inputs, objective):
        return inputs.logprobs.detach().sum()

    with pytest.raises(UserError, match=r"detached .*with a gradient, got one without"):
        gradient(case, surrogate=detached)
    with pytest.raises(UserError, match=r"constant .*with a gradient, got one without"):
        gradient(case, function=constant)


def test_values_are_looked_at_in_the_first_call_only_since_that_waits_for_a_gpu(case):
    """A later NaN ends the run at the norm of the gradient."""
    values = [torch.ones(5, 6), torch.full((5, 6), NAN)]

    def own(inputs, objective):
        return values.pop(0) * inputs.logprobs

    objective = Objective(surrogate=own)
    first, second = (losses_of(case.logprobs, case.batch, objective).loss for _ in range(2))
    assert first.isfinite()
    assert second.isnan()


def test_rows_without_an_advantage_go_through_an_own_surrogate():
    """It may have a gradient there."""
    assert Objective(surrogate=own_clip).has_gradient_at_zero_advantage
    assert Objective(function=own_clip).has_gradient_at_zero_advantage
    assert not replace(Objective(), surrogate="sapo").has_gradient_at_zero_advantage


def test_every_call_of_an_advantage_function_must_be_finite():
    """Rows without a score are NaN in the table; the first call may have none."""

    def own(table):
        return table.rewards - table.rewards.mean()

    config = AdvantageConfig(function=own)
    scored = rollouts([[0.0, 1.0]]).reward_table({"task": 1.0})
    assert compute_advantages(scored, config).tolist() == [[-0.5, 0.5]]
    unscored = rollouts([[0.0, None]]).reward_table({"task": 1.0})
    with pytest.raises(UserError, match=r"one advantage per completion.* False in table\.valid"):
        compute_advantages(unscored, config)


def clamps(inputs, objective):
    inputs.advantages.clamp_(max=0.5)
    return clip(inputs, objective)


def changes_the_batch(inputs, objective):
    inputs.batch.sampler_logprobs[:, 0] -= 1
    return clip(inputs, objective)


def doubles(log_ratio, mask):
    return log_ratio.mul_(2)


@pytest.mark.parametrize(
    ("own", "changed"),
    [
        ({"surrogate": clamps}, r"inputs\.advantages"),
        ({"surrogate": changes_the_batch}, r"batch\.sampler_logprobs"),
        ({"sampler_correction": SamplerCorrection(level=doubles)}, "log_ratio"),
    ],
)
def test_arguments_may_not_be_changed_in_place(case, own, changed):
    with pytest.raises(UserError, match=rf"as they are, but has changed {changed} in place"):
        gradient(case, **own)


@dataclass
class Averages:
    """A surrogate with a state of its own, and metrics."""

    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(1))

    def __call__(self, inputs, objective):
        self.mean.mul_(0.9).add_(1)
        inputs.metrics["mean"] = inputs.mask.float()
        inputs.metrics["mean"] *= 2
        return clip(inputs, objective)


def test_the_state_and_the_metrics_of_a_function_are_its_own(case):
    own = Averages()
    for _ in range(2):
        assert_same(gradient(case, surrogate=own), gradient(case, surrogate="clip"))
    assert own.mean.item() == pytest.approx(1.9)


def test_the_table_of_rewards_is_the_functions_own():
    def own(table):
        rewards = table.rewards
        rewards -= rewards.mean(1, keepdim=True)
        table.parts["task"].numpy()[:] = 0
        table.weights["task"] = 0.5
        return rewards

    table = rollouts([[0.0, 1.0]]).reward_table({"task": 1.0})
    found = compute_advantages(table, AdvantageConfig(function=own))
    assert found.tolist() == [[-0.5, 0.5]]
    assert table.rewards.tolist() == table.parts["task"].tolist() == [[0.0, 1.0]]
    assert table.weights == {"task": 1.0}
