"""The divergence from a teacher against loops over tokens and vocabulary, in float64."""

import math
from dataclasses import replace

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

from lit_grpo.objective import DistillationTerm, KLTerm, Objective
from lit_grpo.objective.distillation import sampled_divergence, top_divergence
from lit_grpo.objective.loss import token_losses
from lit_grpo.objective.ratios import MAX_LOG_RATIO

SEEDS = range(10)
VOCABULARY = 9


def tokens_of(batch):
    return batch.loss_mask.nonzero().tolist()


def distributions(seed: int, *shape: int) -> torch.Tensor:
    """Draw logarithms of distributions over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, VOCABULARY, generator=generator).log_softmax(-1)


def case_with_teacher(seed: int):
    case = random_case(seed, has_ref=False)
    generator = torch.Generator().manual_seed(seed + 100)
    teacher = case.logprobs + torch.randn(case.logprobs.shape, generator=generator)
    return replace(case, batch=replace(case.batch, teacher_logprobs=teacher))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", ["token", "sequence_sum"])
def test_the_sampled_divergence_has_the_gradient_of_the_reverse_kl(aggregation, seed):
    """For a token x from the sampler mu: d KL = E_mu[pi / mu * log(pi / teacher) * d log pi]."""
    case = case_with_teacher(seed)
    batch, value, gradient = case.batch, 0.0, torch.zeros_like(case.logprobs)
    tokens = tokens_of(batch)
    divisor = len(tokens) if aggregation == "token" else int(batch.loss_mask.any(1).sum())
    for n, t in tokens:
        log_policy, log_teacher = float(case.logprobs[n, t]), float(batch.teacher_logprobs[n, t])
        ratio = math.exp(log_policy - float(batch.sampler_logprobs[n, t]))
        contribution = 0.6 * ratio * (log_policy - log_teacher) / divisor
        value += contribution
        gradient[n, t] = contribution
    objective = Objective(
        surrogate="none", aggregation=aggregation, distillation=DistillationTerm(coef=0.6)
    )
    ours = gradient_of(case, objective, counts_of(batch))
    assert_same(ours[:2], [torch.tensor(value), gradient])


@pytest.mark.parametrize("seed", SEEDS)
def test_in_expectation_the_sampled_divergence_and_its_gradient_are_those_of_the_reverse_kl(seed):
    scores = distributions(seed, 1)[0].requires_grad_()
    teacher, sampler = distributions(seed + 50, 1)[0], distributions(seed + 90, 1)[0]
    policy = scores.log_softmax(-1)
    exact = sum(policy[v].exp() * (policy[v] - teacher[v]) for v in range(VOCABULARY))
    every_token = sampled_divergence(policy[None], teacher[None], sampler[None])[0]
    expected = (sampler.exp() * every_token).sum()
    (ours,) = torch.autograd.grad(expected, scores, retain_graph=True)
    (theirs,) = torch.autograd.grad(exact, scores)
    assert_same([expected.detach(), ours], [exact.detach(), theirs])


def loop_over_classes(policy, teacher, top):
    """Return the divergence over some tokens and one class of all others, of one position."""
    total, others, teacher_others = 0.0, 1.0, 1.0
    for v in top:
        p, q = policy[v].exp(), teacher[v].exp()
        total = total + p * torch.log(p / q)
        others, teacher_others = others - p, teacher_others - q
    return total + others * torch.log(others / teacher_others)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [1, 3, VOCABULARY - 1])
def test_the_divergence_over_the_top_tokens_is_that_of_a_loop_over_them(k, seed):
    case = random_case(seed, has_ref=False)
    scores, teacher = (distributions(seed + i, *case.logprobs.shape) for i in (0, 500))
    scores.requires_grad_()
    policy = scores.log_softmax(-1)
    top = teacher.topk(k)
    batch = replace(case.batch, teacher_ids=top.indices.int(), teacher_logprobs=top.values)
    tokens = tokens_of(batch)
    expected = sum(
        loop_over_classes(policy[n, t], teacher[n, t], top.indices[n, t].tolist())
        for n, t in tokens
    ) / len(tokens)
    losses = token_losses(
        case.logprobs,
        case.entropy,
        batch,
        counts_of(batch),
        Objective(surrogate="none", distillation=DistillationTerm(coef=0.8, top_k=k)),
        candidate_logprobs=policy.gather(-1, top.indices),
    )
    (ours,) = torch.autograd.grad(losses.loss, scores, retain_graph=True)
    (theirs,) = torch.autograd.grad(0.8 * expected, scores)
    assert_same([losses.loss.detach(), ours], [0.8 * expected.detach(), theirs])
    mean = losses.distillation_kl[batch.loss_mask].mean()
    torch.testing.assert_close(mean, expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_over_the_whole_vocabulary_it_is_the_reverse_kl_and_over_fewer_tokens_it_is_less(seed):
    scores, teacher = distributions(seed, 1, 1).requires_grad_(), distributions(seed + 500, 1, 1)
    policy = scores.log_softmax(-1)
    exact = (policy.exp() * (policy - teacher)).sum()
    values = []
    for k in range(1, VOCABULARY + 1):
        top = teacher.topk(k)
        values.append(top_divergence(policy.gather(-1, top.indices), top.values).sum())
    gradients = [torch.autograd.grad(one, scores, retain_graph=True)[0] for one in values[-1:]]
    gradients += torch.autograd.grad(exact, scores)
    assert_same([values[-1].detach(), gradients[0]], [exact.detach(), gradients[1]])
    assert all(0 <= one <= other + 1e-12 for one, other in zip(values, values[1:], strict=False))


def test_a_token_that_the_teacher_excludes_is_bounded_and_keeps_its_gradient():
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    teacher = torch.tensor([[-60.0, -math.inf]])
    divergence = sampled_divergence(logprobs, teacher, logprobs.detach())
    divergence.sum().backward()
    assert divergence.tolist() == [[MAX_LOG_RATIO, MAX_LOG_RATIO]]
    assert logprobs.grad.tolist() == [[MAX_LOG_RATIO, MAX_LOG_RATIO]]


def test_top_tokens_that_policy_or_teacher_exclude_have_a_finite_divergence():
    impossible = -math.inf
    logprobs = torch.tensor([[[-0.5, impossible, impossible, -1.0]]], requires_grad=True)
    teacher = torch.tensor([[[0.0, -3.0, impossible, impossible]]])
    divergence = top_divergence(logprobs, teacher)
    divergence.sum().backward()
    assert divergence.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_the_divergences_of_reference_and_teacher_are_added():
    case = case_with_teacher(3)
    batch = replace(case.batch, ref_logprobs=case.logprobs - 0.3)
    both = Objective(kl=KLTerm(coef=0.2), distillation=DistillationTerm(coef=0.6))
    losses = losses_of(case.logprobs, batch, both)
    mask, num_tokens = batch.loss_mask, batch.loss_mask.sum()
    terms = losses.surrogate + 0.2 * losses.kl + 0.6 * losses.distillation_kl
    torch.testing.assert_close(losses.loss, (terms * mask).sum() / num_tokens)
