from types import SimpleNamespace

import pytest

from lit_grpo.judge import Price
from lit_grpo.judge.ledger import Ledger, Usage


def test_each_kind_of_token_has_its_price():
    usage = Usage(prompt_tokens=1000, cached_prompt_tokens=400, completion_tokens=50)
    assert usage.num_tokens == 1050
    assert usage.cost(Price(prompt=2.0, completion=8.0)) == pytest.approx(0.0024)
    price = Price(prompt=2.0, completion=8.0, cached_prompt=0.5)
    assert usage.cost(price) == pytest.approx(0.0018)
    assert usage.cost(None) == 0


def test_missing_token_counts_are_0():
    assert Usage.of(None) == Usage.of("many") == Usage()
    partial = SimpleNamespace(prompt_tokens=None, completion_tokens=3, prompt_tokens_details=None)
    assert Usage.of(partial) == Usage(completion_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "cached", "completion", "expected"),
    [
        (-1, 0, 3, Usage()),
        (10, 0, -3, Usage()),
        (10, -7, 3, Usage(prompt_tokens=10, completion_tokens=3)),
        (10, 11, 3, Usage(prompt_tokens=10, completion_tokens=3)),
        (10.0, float("nan"), 3, Usage(prompt_tokens=10, completion_tokens=3)),
    ],
)
def test_numbers_of_tokens_that_cannot_be_are_not_counted(prompt, cached, completion, expected):
    usage = SimpleNamespace(
        prompt_tokens=prompt,
        completion_tokens=completion,
        prompt_tokens_details=SimpleNamespace(cached_tokens=cached),
    )
    assert Usage.of(usage) == expected


def test_cached_tokens_are_read_from_the_details():
    details = SimpleNamespace(cached_tokens=7)
    usage = SimpleNamespace(prompt_tokens=10, completion_tokens=3, prompt_tokens_details=details)
    assert Usage.of(usage).cached_prompt_tokens == 7


def test_reading_resets_the_counts_and_names_those_that_are_0():
    ledger = Ledger()
    ledger.count("calls")
    ledger.count("calls")
    ledger.add_usage(Usage(prompt_tokens=5, completion_tokens=2), 0.5)
    ledger.add_waits({"max_concurrency": 1.0, "retry_after": 2.0})
    read = ledger.read()
    assert read.totals == {
        "judge/calls": 2,
        "judge/retries": 0,
        "judge/rate_limited": 0,
        "judge/parse_errors": 0,
        "judge/cache_hits": 0,
        "judge/prompt_tokens": 5,
        "judge/cached_prompt_tokens": 0,
        "judge/completion_tokens": 2,
        "judge/cost_usd": 0.5,
        "timing/judge_wait_max_concurrency_s": 1.0,
        "timing/judge_wait_retry_after_s": 2.0,
    }
    assert read.samples == {"timing/semaphore_wait_s": [3.0]}
    assert not any(ledger.read().totals.values())
    assert not ledger.read().samples
