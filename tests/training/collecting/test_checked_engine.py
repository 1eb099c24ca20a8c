"""What an engine of the user's may do wrong, and how it is told so."""

import re
from dataclasses import replace
from functools import partial
from math import inf, nan

import numpy as np
import pytest
import torch
from tiny import completion, prompt, tiny_policy

from lit_grpo.rollout import EngineFailed, RolloutEngine, Sampling
from lit_grpo.training.collecting.checked_engine import (
    close_engine,
    generate,
    load_weights,
    start_engine,
)
from lit_grpo.training.waiting import StepAbandoned
from lit_grpo.types import Completion, UserError
from lit_grpo.types.errors import Diverged, EngineBug, OutOfMemory

DONE = completion()
NAME = rf"^{__name__}\.Mine\.generate \(\S+test_checked_engine\.py:\d+\) "
ROWS = r"must yield each of the len\(prompts\) \* group_size = 4 rows exactly once, in any order, "


class Mine(RolloutEngine):
    """Yield what it is given, of which an exception is raised."""

    def __init__(self, items):
        self.items = items
        self.is_closed = False

    def load_weights(self, policy, version): ...

    def generate(self, prompts, group_size, sampling, *, seed):
        try:
            for item in self.items:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.is_closed = True


class Returns(Mine):
    def generate(self, prompts, group_size, sampling, *, seed):
        return self.items


def sampled(engine, *, num_prompts: int = 2):
    return generate(engine, [prompt()] * num_prompts, 2, Sampling(), seed=0)


@pytest.mark.parametrize("kind", [Mine, Returns])
def test_each_row_once_in_any_order_passes(kind):
    failed = Completion.failed("no answer")
    rows = [(3, DONE), (torch.tensor(0), DONE), (2, failed), (1, DONE)]
    assert [*sampled(kind(rows))] == [(3, DONE), (0, DONE), (2, failed), (1, DONE)]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([], r"got 0 of them \(missing: 0, 1, 2, 3\)\. Yield Completion\.failed\(why\)"),
        ([2, 0], r"got 2 of them \(missing: 1, 3\)\. Yield Completion\.failed\(why\)"),
        ([0, 0], r"got row 0 twice\. Row n is completion n % group_size of prompt n // group"),
        ([0, 1, 2, 3, 3], "got row 3 twice"),
        ([0, 4], r"got row 4 \(the last one is 3\)\. Row n is completion"),
        ([-1], r"got row -1 \(the last one is 3\)"),
    ],
)
def test_rows_that_are_missing_given_twice_or_not_asked_for_are_named(rows, what):
    with pytest.raises(EngineBug, match=NAME + ROWS + what):
        list(sampled(Mine([(row, DONE) for row in rows])))


def test_many_missing_rows_are_not_all_named():
    with pytest.raises(EngineBug, match=r"\(missing: 0, 1, 2, 3, 4, 5, 6, 7, …\)"):
        list(sampled(Mine([]), num_prompts=9))


@pytest.mark.parametrize(
    "item", [DONE, (0, "text"), ("0", DONE), (0, DONE, 1), None], ids=lambda one: str(one)[:12]
)
def test_what_is_no_row_with_its_completion_is_shown(item):
    what = re.escape(str(item)[:100])
    with pytest.raises(
        EngineBug, match=f"{NAME}must yield pairs of a row number and a Completion, got {what}"
    ):
        list(sampled(Mine([item])))


def test_an_engine_that_returns_nothing_is_told_to_yield():
    name = NAME.replace("Mine", "Returns")
    what = r"must return an iterator .* got None\. Write yield"
    with pytest.raises(EngineBug, match=name + what):
        list(sampled(Returns(None)))


@pytest.mark.parametrize("name", ["sampler_logprobs", "policy_versions"])
def test_an_engine_that_yields_too_few_entries_is_told_which(name):
    num_tokens = len(DONE.token_ids)
    short = replace(DONE, **{name: (0,) * (num_tokens - 1)})
    what = f"{name} with one entry per token, got {num_tokens - 1} for the {num_tokens} tokens"
    with pytest.raises(EngineBug, match=f"{NAME}must yield {what} of row 1"):
        list(sampled(Mine([(0, DONE), (1, short)])))


@pytest.mark.parametrize("wrong", [nan, inf, -inf, 0.5, torch.tensor(nan), None], ids=str)
def test_a_logprob_that_is_no_logarithm_of_a_probability_is_shown_with_its_row(wrong):
    one = completion([1, 2, 3], logprobs=[-1.0, wrong, -2.0])
    shown = wrong.item() if isinstance(wrong, torch.Tensor) else wrong
    what = rf"must yield sampler_logprobs that are finite and <= 0, got {shown} in "
    with pytest.raises(EngineBug, match=NAME + what + r"row 1\. Set sampler_logprobs"):
        list(sampled(Mine([(0, DONE), (1, one)])))


@pytest.mark.parametrize("wrong", [999_999, -1, 3.0, None, "7"], ids=str)
def test_a_token_that_the_policy_has_not_is_shown_with_its_row_and_those_it_has(wrong):
    engine = Mine([(0, DONE), (1, completion([1, wrong, 3]))])
    policy = tiny_policy()
    start_engine(engine, policy)
    last = policy.model.config.vocab_size - 1
    what = f"must yield token_ids that are whole numbers from 0 to {last}, the tokens of the policy"
    with pytest.raises(EngineBug, match=rf"{NAME}{what}, got {wrong!r} in row 1\. Set token_ids"):
        list(sampled(engine))


def test_a_completion_that_goes_on_after_max_tokens_is_refused():
    longest = Sampling().max_tokens
    assert len(list(sampled(Mine([(row, completion([1] * longest)) for row in range(4)])))) == 4
    what = "must yield completions of at most max_tokens = 256 tokens, got 257 in row 0"
    with pytest.raises(EngineBug, match=NAME + what):
        list(sampled(Mine([(0, completion([1] * (longest + 1)))])))


def test_every_token_of_the_policy_passes_whatever_the_kind_of_its_number():
    ids = (0, np.int64(5), torch.tensor(6), tiny_policy().model.config.vocab_size - 1)
    engine = Mine([(row, completion(ids)) for row in range(4)])
    start_engine(engine, tiny_policy())
    assert [one.token_ids for _, one in sampled(engine)] == [ids] * 4


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda given: [*np.array(given)]])
def test_lists_and_arrays_become_tuples_of_plain_numbers(kind):
    ids, logprobs = (1, 2, 3), (-0.5, -1.0, -0.25)
    one = replace(
        completion(ids),
        token_ids=kind(ids),
        sampler_logprobs=kind(logprobs),
        policy_versions=kind((0, 0, 1)),
    )
    found = [one for _, one in sampled(Mine([(row, one) for row in range(4)]))]
    for one in found:
        assert (one.token_ids, one.sampler_logprobs, one.policy_versions) == (
            ids,
            logprobs,
            (0, 0, 1),
        )
        assert {type(value) for value in one.token_ids + one.policy_versions} == {int}
        assert {type(value) for value in one.sampler_logprobs} == {float}


@pytest.mark.parametrize("field", ["token_ids", "sampler_logprobs", "policy_versions"])
@pytest.mark.parametrize(
    "wrong", [None, 3, torch.tensor(3), {1, 2, 3}, [torch.ones(2)], [np.ones(2)]], ids=str
)
def test_what_has_no_entries_for_the_tokens_is_shown_with_its_row(field, wrong):
    what = (
        rf"must yield {field} as a tuple with one entry per token, got .* in row 1\. Set {field} of"
    )
    with pytest.raises(EngineBug, match=NAME + what):
        list(sampled(Mine([(0, DONE), (1, replace(DONE, **{field: wrong}))])))


def test_infinite_logprobs_of_both_signs_are_found():
    one = completion([1, 2], logprobs=[inf, -inf])
    with pytest.raises(EngineBug, match=NAME + "must yield sampler_logprobs .* got inf in row 0"):
        list(sampled(Mine([(0, one)])))


def test_logprobs_may_be_as_low_as_they_like_and_above_0_by_rounding():
    one = completion([1, 2, 3], logprobs=[-9999.0, 0.0, 9e-4])
    rows = [(row, one) for row in range(4)]
    assert list(sampled(Mine(rows))) == rows


def test_an_engine_that_ends_a_completion_for_an_unknown_reason_is_told_so():
    one = replace(DONE, finish_reason="eos")
    what = "must yield a finish_reason of stop, length, failed, got 'eos' in row 0"
    with pytest.raises(EngineBug, match=NAME + what):
        list(sampled(Mine([(0, one)])))


def test_an_exception_is_shown_from_the_users_line_on():
    rows = sampled(Mine([(0, DONE), KeyError("row")]))
    assert next(rows) == (0, DONE)
    what = r"failed:\nTraceback \(most recent call last\):\n  File \"\S+test_checked_engine\.py\""
    with pytest.raises(EngineBug, match=NAME + what) as caught:
        next(rows)
    assert str(caught.value).endswith("KeyError: 'row'")
    assert 'checked_engine.py", line' not in str(caught.value).replace("test_checked_engine", "")


@pytest.mark.parametrize(
    "error",
    [
        EngineFailed("no server is left"),
        StepAbandoned("a callback ended the run"),
        UserError("set it"),
        Diverged("NaN"),
        OutOfMemory("in the stage generation"),
        torch.OutOfMemoryError("CUDA out of memory"),
        OSError(28, "No space left on device"),
        RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"),
        KeyboardInterrupt(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_errors_that_end_a_run_in_their_own_way_pass(error):
    with pytest.raises(type(error)) as caught:
        list(sampled(Mine([error])))
    assert caught.value is error


def test_an_exception_in_an_engine_of_lit_grpo_is_no_bug_of_the_users(monkeypatch):
    monkeypatch.setattr(Mine, "__module__", "lit_grpo.rollout.mine")
    with pytest.raises(KeyError):
        list(sampled(Mine([KeyError("row")])))


def test_closing_the_iterator_closes_that_of_the_engine():
    rows = sampled(engine := Mine([(0, DONE), (1, DONE)]))
    next(rows)
    assert not engine.is_closed
    rows.close()
    assert engine.is_closed


class Fails(Mine):
    def start(self, policy):
        raise KeyError("start")

    def load_weights(self, policy, version):
        raise self.items


@pytest.mark.parametrize(
    ("call", "method"),
    [(start_engine, "start"), (partial(load_weights, version=0), "load_weights")],
)
def test_an_exception_in_another_method_is_shown_from_the_users_line_on(call, method):
    name = NAME.replace("Mine", "Fails").replace("generate ", f"{method} ")
    what = r"failed:\nTraceback \(most recent call last\):\n  File \"\S+test_checked_engine\.py\""
    with pytest.raises(EngineBug, match=name + what) as caught:
        call(Fails(KeyError("load_weights")), tiny_policy())
    assert str(caught.value).endswith(f"KeyError: '{method}'")


def test_an_exception_at_the_end_is_logged(caplog):
    class Leaves(Mine):
        def close(self):
            raise KeyError("pool")

    close_engine(Leaves([]))
    assert "Leaves.close (" in caplog.text
    assert "KeyError: 'pool'" in caplog.text


def test_an_engine_may_give_up_while_it_loads_weights():
    error = EngineFailed("no server is left")
    with pytest.raises(EngineFailed) as caught:
        load_weights(Fails(error), None, 0)
    assert caught.value is error
