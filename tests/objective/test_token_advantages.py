"""Advantages by token against loops that are written from the papers."""

import math
import random
import statistics

import pytest
import torch

from lit_grpo.objective import AdvantageConfig
from lit_grpo.objective.advantages import compute_advantages
from lit_grpo.objective.token_advantages import TokenRewards, rewards_to_go, token_advantages
from lit_grpo.types import RewardTable, UserError

BATCH = {"baseline": "batch", "deviation": "batch", "batch_statistics": "tokens"}


def own(values):
    """Return the values of the only rank."""
    return values


def token_rewards(rows: list[dict[int, float]], lengths: list[int], group_size=2) -> TokenRewards:
    """Build completions of these lengths, with rewards at some of their tokens."""
    shape = (len(rows), max(lengths))
    values, has_reward = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape).bool()
    for n, row in enumerate(rows):
        for t, value in row.items():
            values[n, t], has_reward[n, t] = value, True
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return TokenRewards(values=values, has_reward=has_reward, mask=mask, group_size=group_size)


def random_rewards(seed: int) -> tuple[list[dict[int, float]], list[int]]:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 6) for _ in range(6)]
    rows = [
        {t: draw.gauss(0, 1) for t in range(length) if t == length - 1 or draw.random() < 0.4}
        for length in lengths
    ]
    return rows, lengths


def test_rewards_to_go_are_discounted_by_token():
    rewards = torch.tensor([[1.0, 0.0, 4.0]], dtype=torch.float64)
    assert rewards_to_go(rewards, 1.0).tolist() == [[5.0, 4.0, 4.0]]
    assert rewards_to_go(rewards, 0.5).tolist() == [[2.0, 2.0, 4.0]]
    assert rewards_to_go(rewards, 0.0).tolist() == [[1.0, 0.0, 4.0]]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_with_process_supervision_rewards_are_normalised_in_their_group_and_summed(discount, seed):
    """arXiv 2402.03300 section 4.1.3."""
    rows, lengths = random_rewards(seed)
    found = token_advantages(token_rewards(rows, lengths), AdvantageConfig(discount=discount), own)
    for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        first = n - n % 2
        group = [value for member in rows[first : first + 2] for value in member.values()]
        mean, deviation = statistics.mean(group), statistics.stdev(group)
        for t in range(length):
            expected = sum(
                discount ** (s - t) * (value - mean) / deviation
                for s, value in row.items()
                if s >= t
            )
            assert found[n, t].item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
        assert not found[n, length:].any()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("deviation", ["batch", "none"])
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_over_the_batch_the_returns_of_all_tokens_are_normalised(discount, deviation, seed):
    """arXiv 2501.03262 equations 4 and 5."""
    rows, lengths = random_rewards(seed)
    returns = {
        (n, t): sum(discount ** (s - t) * value for s, value in rows[n].items() if s >= t)
        for n, length in enumerate(lengths)
        for t in range(length)
    }
    mean = statistics.mean(returns.values())
    scale = statistics.stdev(returns.values()) if deviation == "batch" else 1
    config = AdvantageConfig(discount=discount, **(BATCH | {"deviation": deviation}))
    found = token_advantages(token_rewards(rows, lengths), config, own)
    for (n, t), value in returns.items():
        assert found[n, t].item() == pytest.approx((value - mean) / scale, rel=1e-10, abs=1e-12)
    assert not found[~token_rewards(rows, lengths).mask].any()


@pytest.mark.parametrize("settings", [{}, {"deviation": "none"}, BATCH])
def test_one_reward_at_the_end_gives_all_tokens_the_advantage_of_the_completion(settings):
    lengths, values = [3, 1, 2, 4], [1.0, 0.0, 0.5, 2.0]
    rows = [{length - 1: value} for length, value in zip(lengths, values, strict=True)]
    found = token_advantages(
        token_rewards(rows, lengths), AdvantageConfig(discount=1.0, **settings), own
    )
    rewards = torch.tensor(values, dtype=torch.float64).view(2, 2)
    table = RewardTable(
        rewards=rewards,
        parts={"task": rewards},
        weights={"task": 1.0},
        valid=torch.ones(2, 2).bool(),
        lengths=torch.tensor(lengths).double().view(2, 2),
    )
    expected = compute_advantages(table, AdvantageConfig(**settings)).flatten()
    for n, length in enumerate(lengths):
        assert found[n, :length].tolist() == pytest.approx([expected[n].item()] * length)


@pytest.mark.parametrize("settings", [{}, BATCH])
def test_equal_rewards_give_no_advantage(settings):
    rows = [{2: 0.3}, {0: 0.1 + 0.2}]
    config = AdvantageConfig(discount=1.0, **settings)
    assert not token_advantages(token_rewards(rows, [3, 1]), config, own).any()


def test_one_token_that_differs_among_millions_has_an_advantage():
    config = AdvantageConfig(discount=0.0, **BATCH)
    rewards = token_rewards([{0: 1.0 + 1e-6}, {0: 1.0}], [1, 1])
    others = torch.ones(10**7, dtype=torch.float64)
    found = token_advantages(rewards, config, lambda values: torch.cat([values, others]))
    assert found[0, 0] > 1000
    assert abs(found[1, 0]) < 0.001


def test_the_statistics_are_over_all_ranks():
    config = AdvantageConfig(discount=1.0, **BATCH)
    rows, lengths = random_rewards(3)
    whole = token_rewards(rows, lengths)
    expected = token_advantages(whole, config, own)
    all_returns = rewards_to_go(whole.values, 1.0)[whole.mask]
    part = TokenRewards(
        values=whole.values[:2],
        has_reward=whole.has_reward[:2],
        mask=whole.mask[:2],
        group_size=2,
    )
    found = token_advantages(part, config, lambda _: all_returns)
    torch.testing.assert_close(found, expected[:2])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"discount": 1.5}, "model.advantage.discount"),
        ({"discount": math.nan}, "model.advantage.discount"),
        ({"discount": 1.0, "baseline": "leave_one_out"}, "model.advantage.baseline"),
        ({"discount": 1.0, "deviation": "mean"}, "model.advantage.baseline"),
        ({"discount": 1.0, "baseline": "batch", "deviation": "none"}, "model.advantage.baseline"),
        ({"discount": 1.0, "rescale": True}, "model.advantage.discount to null"),
        ({"discount": 1.0, "combine": "normalise_then_sum"}, "model.advantage.discount to null"),
        ({"discount": 1.0, "function": own}, "model.advantage.discount to null"),
    ],
)
def test_settings_that_have_no_meaning_by_token_are_refused(settings, key):
    with pytest.raises(UserError, match=rf"Set {key}"):
        AdvantageConfig(**settings)
