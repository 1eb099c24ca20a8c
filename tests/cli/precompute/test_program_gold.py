"""Verifiable rows get right and wrong answers that a program has told apart, or none."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from paths import ROOT

from lit_grpo.cli.precompute.program_gold import Checks, check_rows, load_verifier, unchecked
from lit_grpo.cli.prepare.collect import collect
from lit_grpo.cli.prepare.gold_cache import CheckedAnswers
from lit_grpo.cli.prepare.join_gold import check_key
from lit_grpo.cli.prepare.recipe import read_recipe
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.types import UserError

GSM8K = ROOT.parent / "shared/data/gsm8k/train.jsonl"
REWARD = '''
from lit_grpo.rewards import Reward

class EvenReward(Reward):
    """Half a point for an even number of characters; the first letter may be too much for it."""

    def score(self, prompt, completion):
        if completion.text.startswith("?"):
            raise RuntimeError("no such letter")
        return 0.5 * (len(completion.text) % 2 == 0)
'''


def sum_row(number, **columns):
    own = {"prompt": f"What is {number} plus 1?", "answer": str(number + 1), **columns}
    return PreparedRow(
        origin="", id=f"sums:{number}", source="sums", kind="verifiable", text_hash="", columns=own
    )


def check(rows, cache, verifier="MathReward", others=()):
    checks = Checks()
    for batch in check_rows(rows, verifier, cache, others):
        checks.add(batch)
    return checks


@pytest.fixture
def cache(here):
    cache = CheckedAnswers(Path("gold"))
    yield cache
    cache.close()


def test_a_row_gets_one_right_answer_and_three_wrong_ones(cache):
    rows = [sum_row(n, completion=f"{n} and 1: #### {n + 1}") for n in range(100)]
    assert check(rows, cache).num_scored == 100
    cache.refresh()
    for n, row in enumerate(rows):
        found = cache.get(check_key(row, "MathReward"))
        assert found.answers[0] == f"{n} and 1: #### {n + 1}"
        assert found.gold_scores == (1.0, 0.0, 0.0, 0.0)
        assert len(set(found.answers)) == 4
        assert all(one.startswith(f"{n} and 1: #### ") for one in found.answers)
    assert unchecked([*rows, sum_row(100)], "MathReward", cache) == [sum_row(100)]
    assert unchecked(rows[:3], "FormatReward", cache) == rows[:3]


def test_a_wrong_solution_or_none_is_replaced_by_the_answer_itself(cache):
    rows = [sum_row(1, completion="#### 77"), sum_row(2)]
    check(rows, cache)
    cache.refresh()
    for row, right in zip(rows, ("2", "3"), strict=True):
        found = cache.get(check_key(row, "MathReward"))
        assert found.answers[0] == f"The answer is {right}."
        assert found.gold_scores == (1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("solution", [None, "Say 53. #### 53"])
def test_of_a_list_of_gold_answers_the_first_is_the_right_one_and_none_is_wrong(cache, solution):
    rows = [sum_row(n, answer=f'["{n}", "{n + 1}"]', completion=solution) for n in (3, 53)]
    assert check(rows, cache).num_scored == 2
    cache.refresh()
    for row, right in zip(rows, ("3", "53"), strict=True):
        found = cache.get(check_key(row, "MathReward"))
        is_solved = solution and right == "53"
        assert found.answers[0] == (solution if is_solved else f"The answer is {right}.")
        assert found.gold_scores == (1.0, 0.0, 0.0, 0.0)
        assert not any("[" in one for one in found.answers)


def test_stored_answers_are_kept_and_get_others_only_if_they_do_not_differ(cache):
    apart = sum_row(1, answers=["It is 2", "It is 3", "It is 2."])
    alike = sum_row(1, answers=["It is 4", "It is 3"])
    check([apart, alike], cache)
    cache.refresh()
    found = cache.get(check_key(apart, "MathReward"))
    assert found.answers == ("It is 2", "It is 3", "It is 2.")
    assert found.gold_scores == (1.0, 0.0, 1.0)
    found = cache.get(check_key(alike, "MathReward"))
    assert found.answers[:3] == ("It is 4", "It is 3", "The answer is 2.")
    assert found.gold_scores == (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)


def test_a_row_that_is_left_after_a_kill_gets_the_answers_that_it_would_have_got(here):
    words = ["Bern", "Oslo", "Paris", "Rome", "Riga", "Vienna", "Prague", "Lima"]
    rows = [sum_row(n, prompt=f"Which is city {n}?", answer=word) for n, word in enumerate(words)]
    found = []
    for name, first in (("whole", len(rows)), ("resumed", len(rows) - 1)):
        with closing(CheckedAnswers(Path(name))) as cache:
            for some in (rows[:first], rows[first:]):
                assert check(some, cache, others=rows).num_scored == len(some)
            cache.refresh()
            found.append([cache.get(check_key(row, "MathReward")) for row in rows])
    assert found[0] == found[1]
    assert found[0][-1].gold_scores == (1.0, 0.0, 0.0, 0.0)


def test_a_row_that_cannot_be_checked_has_a_reason_and_no_gold(cache):
    rows = [sum_row(1, answer=None), sum_row(2, answer=""), sum_row(3)]
    checks = check(rows, cache)
    assert checks.num_scored == 1
    reasons = {why.split(":")[0]: ids for why, ids in checks.failures.items()}
    assert reasons == {"no gold answer": ["sums:1"], "error": ["sums:2"]}
    cache.refresh()
    assert cache.get(check_key(rows[1], "MathReward")) is None


def test_a_verifier_of_the_user_decides_by_its_own_values(cache, here, monkeypatch):
    (here / "even_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(here))
    rows = [
        sum_row(1, answers=["ab", "abc"]),
        sum_row(2, answers=["?"]),
        sum_row(3, answer="x", completion="x!"),
    ]
    checks = check(rows, cache, "even_reward.EvenReward")
    assert checks.failures == {
        "error: RuntimeError: no such letter (even_reward.py, line 9)": ["sums:2"],
        "right and wrong answers get the same value": ["sums:3"],
    }
    cache.refresh()
    found = cache.get(check_key(rows[0], "even_reward.EvenReward"))
    assert (found.answers, found.gold_scores) == (("ab", "abc"), (0.5, 0.0))


def test_a_verifier_has_settings_and_a_wrong_one_is_named():
    reward = load_verifier({"class_path": "MathReward", "init_args": {"correct": 2.0}})
    assert reward.correct == 2.0
    with pytest.raises(UserError, match="MathReward"):
        load_verifier("MathsReward")


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not there")
def test_rows_of_gsm8k_all_get_gold(cache):
    recipe = read_recipe("verifiable_only", [f"verifiable={GSM8K}"])
    rows = collect("verifiable", recipe.sources["verifiable"], "refuse", "verifiable_only").rows[
        :500
    ]
    checks = check(rows, cache)
    assert checks.num_scored == 500
    cache.refresh()
    found = [cache.get(check_key(row, "MathReward")) for row in rows]
    assert all(one.gold_scores == (1.0, 0.0, 0.0, 0.0) for one in found)
