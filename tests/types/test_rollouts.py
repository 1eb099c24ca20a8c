import copy
import json
import pickle
import threading
from dataclasses import replace

import pytest
import torch
from tiny import completion, prompt, rollouts

from lit_grpo.types import Completion
from lit_grpo.types.rollouts import counted_rows


@pytest.mark.parametrize(
    "change",
    [
        lambda columns: columns.pop("level"),
        lambda columns: columns.update(level="0"),
        lambda columns: columns.setdefault("other", 1),
        lambda columns: columns.__setitem__("level", "0"),
        lambda columns: columns.__delitem__("level"),
        lambda columns: columns.clear(),
    ],
)
def test_columns_of_a_prompt_cannot_be_changed_but_copied(change):
    one = prompt("q", level="1")
    with pytest.raises(TypeError, match="Change a copy"):
        change(one.columns)
    change(dict(one.columns))
    assert one.columns == {"level": "1"}
    assert json.loads(json.dumps(one.columns)) == one.columns
    for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert again == one
        with pytest.raises(TypeError, match="Change a copy"):
            change(again.columns)


READS = [
    lambda columns: columns["words"],
    lambda columns: columns.get("words"),
    lambda columns: dict(columns)["words"],
    lambda columns: {**columns}["words"],
    lambda columns: [*columns.values()][0],
    lambda columns: [*columns.items()][0][1],
    lambda columns: columns.copy()["words"],
    lambda columns: (columns | {"level": 1})["words"],
    lambda columns: ({"level": 1} | columns)["words"],
    lambda columns: pickle.loads(pickle.dumps(columns))["words"],
]


@pytest.mark.parametrize("read", READS)
def test_a_list_in_the_columns_is_a_copy_however_it_is_read(read):
    columns = prompt("p", words=["a", {"b": ["c"]}]).columns
    read(columns)[1]["b"].clear()
    read(columns).clear()
    assert columns == {"words": ["a", {"b": ["c"]}]}
    assert read(columns) == ["a", {"b": ["c"]}]
    assert json.loads(json.dumps(columns)) == columns


def test_what_cannot_be_copied_is_given_as_it_is():
    locks = [threading.Lock()]
    assert prompt("p", locks=locks).columns["locks"] is locks


def test_messages_cannot_be_changed():
    one = replace(prompt("p"), messages=({"role": "user", "content": "1+1="},))
    with pytest.raises(TypeError, match="messages of a prompt cannot be changed"):
        one.messages[0]["content"] = "2+2="
    assert one.messages == ({"role": "user", "content": "1+1="},)


def test_a_failed_completion_is_in_the_batch_but_not_among_the_sampled():
    sampled, failed = completion(), Completion.failed("timeout")
    batch = rollouts([[1.0, None]], [[sampled, failed]])
    assert batch.completions == [sampled, failed]
    assert batch.sampled == [sampled]
    assert (failed.is_failed, failed.is_truncated, failed.failure) == (True, False, "timeout")
    assert completion(finish_reason="length").is_truncated


def test_groups_are_replaced_with_all_their_values():
    batch = rollouts([[0, 1], [2, 3], [4, 5]])
    fresh = rollouts([[6, None]], [[completion([9]), completion([8])]])
    replaced = batch.with_groups([1], fresh)
    assert replaced.groups == (batch.groups[0], fresh.groups[0], batch.groups[2])
    assert replaced.valid.tolist() == [[True, True], [True, False], [True, True]]
    for values in (replaced.rewards, replaced.parts["task"]):
        torch.testing.assert_close(
            values.nan_to_num(-1), torch.tensor([[0, 1], [6, -1], [4, 5]], dtype=torch.float64)
        )
    assert batch.rewards.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_results_are_those_of_replaced_groups_as_well():
    batch = rollouts([[0, 1], [2, 2]]).with_groups([1], rollouts([[None, 3]]))
    again = batch.with_groups([1], rollouts([[4, 5]]))
    assert [one.rewards for one in batch.results] == [(2, 2), (0, 1), (3,)]
    assert [one.rewards for one in again.results] == [(2, 2), (3,), (0, 1), (4, 5)]
    excluded = [one.rewards for one in again.without_stale([True, False]).results]
    assert excluded == [(2, 2), (3,), (), (4, 5)]


def test_excluded_groups_have_no_valid_rows_and_no_rewards():
    batch = rollouts([[0, 1], [2, None]])
    excluded = batch.without_stale([True, False])
    assert excluded.valid.tolist() == [[False, False], [True, False]]
    assert excluded.rewards.isnan().tolist() == [[True, True], [False, True]]
    assert excluded.groups == batch.groups
    assert (batch.stale, excluded.stale) == (frozenset(), {0})
    assert excluded.without_stale([False, True]).stale == {0, 1}


def test_a_replaced_group_is_no_longer_stale():
    stale = rollouts([[0, 1], [2, 3]]).without_stale([True, True])
    assert stale.with_groups([1], rollouts([[4, 5]])).stale == {0}


def test_counted_rows_are_the_valid_ones_of_groups_with_at_least_two():
    valid = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    assert counted_rows(valid).tolist() == [[True, True, False], [False] * 3, [False] * 3]
