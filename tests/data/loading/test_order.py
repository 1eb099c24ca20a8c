"""The order of a table's rows, which a seed and a position determine."""

import pytest
from prepared_data import write_prepared
from tiny import prompt

from lit_grpo.data.loading import order as orders
from lit_grpo.data.loading.order import TableOrder
from lit_grpo.data.prompts.lazy_prompts import LazyPrompts
from lit_grpo.data.prompts.prompt_format import PromptFormat
from lit_grpo.data.rows.mapped import MappedRows
from lit_grpo.data.rows.prepared import find_prepared
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.types import UserError


def table(number: int = 5, *, name: str = "sums", seed: int = 0) -> TableOrder:
    return TableOrder(name, [prompt(id=str(row)) for row in range(number)], (seed,))


def ids(prompts) -> list[str]:
    return [one.id for one in prompts]


def test_an_epoch_has_every_row_once_and_a_step_may_go_on_in_the_next():
    source = table(5)
    taken = ids(source.take(3)) + ids(source.take(4)) + ids(source.take(3))
    assert sorted(taken[:5]) == sorted(taken[5:]) == ["0", "1", "2", "3", "4"]
    assert taken[:5] == [str(row) for row in source.permutation(0)]
    assert taken[5:] == [str(row) for row in source.permutation(1)]


def test_the_order_depends_on_the_seed_and_the_name_of_the_source_only():
    first = ids(table(50).take(50))
    assert ids(table(50).take(50)) == first
    assert ids(table(50, seed=1).take(50)) != first
    assert ids(table(50, name="words").take(50)) != first


def test_each_seed_of_an_order_is_in_its_description():
    found = [
        TableOrder("sums", [prompt(id="1")], seeds).describe_rows()
        for seeds in ((0, 1), (0, 2), (3, 1))
    ]
    assert [one.partition(" in the order of ")[2] for one in found] == [
        "seed 0, 1",
        "seed 0, 2",
        "seed 3, 1",
    ]


def test_a_source_goes_back_to_an_earlier_position():
    source = table(5)
    source.take(4)
    position = source.position()
    taken = ids(source.take(6))
    source.move_to(position)
    assert ids(source.take(6)) == taken


@pytest.mark.parametrize("taken", [0, 3, 5, 12])
def test_a_loaded_state_goes_on_with_the_very_next_row(taken):
    whole, resumed = table(5), table(5)
    whole.take(taken)
    state = whole.state_dict()
    assert state == {"epoch": taken // 5, "position": taken % 5}
    resumed.load_state_dict(state)
    assert ids(resumed.take(7)) == ids(whole.take(7))


def test_the_fingerprint_is_that_of_the_ids_in_their_order():
    assert table(5).fingerprint == table(5, name="words", seed=1).fingerprint
    assert table(5).fingerprint != table(6).fingerprint
    backwards = TableOrder("sums", [prompt(id=str(row)) for row in reversed(range(5))], (0,))
    assert table(5).fingerprint != backwards.fingerprint


def test_some_prompts_are_spread_over_the_rows():
    assert ids(table(10).some_prompts(4)) == ["0", "3", "6", "9"]
    assert ids(table(10).some_prompts(5)) == ["0", "2", "4", "6", "8"]
    assert len(table(10).some_prompts(10)) == len(table(10).some_prompts(99)) == 10


def test_prompts_are_found_by_their_ids_without_being_taken():
    source = table(5)
    assert source.find(["3", "1", "no such id"]).keys() == {"1", "3"}
    assert source.position() == (0, 0)


@pytest.fixture
def split(tmp_path):
    """Twelve sums, of which ten have at most 18 characters, and twelve longer prompts."""
    return find_prepared(str(write_prepared(tmp_path / "prepared", num_train=12))).split("train")


def lazy(split, max_tokens: int | None = None) -> TableOrder:
    form = PromptFormat(require_answer=False, max_prompt_tokens=max_tokens)
    prompts = LazyPrompts(MappedRows(split.path), byte_tokenizer(), form)
    return TableOrder("mixed", prompts, (0,))


def test_rows_that_are_too_long_are_passed_over(split):
    source = lazy(split, len("What is 9 plus 10?"))
    taken = ids(source.take(20))
    assert set(taken[:10]) == set(taken[10:]) == {f"verifiable:{row}" for row in range(10)}


def test_if_all_rows_are_too_long_there_is_an_error_and_no_endless_search(split):
    with pytest.raises(UserError, match="none of the 24 prompts is within max_prompt_tokens"):
        lazy(split, 3).take(1)


def test_rows_that_are_built_when_needed_have_the_order_of_a_table(split):
    whole = TableOrder("mixed", [prompt(id=row.id) for row in split.rows()], (0,))
    source = lazy(split)
    assert source.fingerprint == whole.fingerprint
    assert source.describe_rows() == lazy(split).describe_rows() != whole.describe_rows()
    ahead = ids(whole.take(6))
    source.prepare_ahead(4)
    assert ids(source.take(6)) == ahead
    assert source.find([ahead[0], "no such id"]).keys() == {ahead[0]}


def test_few_of_them_are_built_to_check_a_run_at_its_start(split, monkeypatch):
    monkeypatch.setattr(orders, "MAX_BUILT_AT_START", 5)
    assert len(lazy(split).some_prompts(1_000)) == 5
