"""The order of a streamed dataset: every row once an epoch, and positions that are found again."""

import re
from dataclasses import replace

import pytest
from data_runs import SHARD_SIZES, write_shards

from lit_grpo.data.loading.stream import PromptStream, StreamOrder
from lit_grpo.data.prompts.prompt_format import PromptFormat
from lit_grpo.data.rows.hf_datasets import open_dataset
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.types import UserError

NUM_ROWS = sum(SHARD_SIZES)


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> PromptStream:
    shards = write_shards(tmp_path_factory.mktemp("data") / "shards")
    name, dataset = open_dataset(str(shards), streaming=True)
    return PromptStream(
        text=str(shards),
        name=name,
        dataset=dataset,
        tokenizer=byte_tokenizer(),
        prompt_format=PromptFormat(),
        where={},
        window=3,
        epoch_size=8,
        held_out=None,
    )


def order_of(stream: PromptStream) -> StreamOrder:
    return StreamOrder("", stream, (0,))


def ids(prompts) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_every_row_comes_once_an_epoch_by_shards_and_windows(stream):
    order = order_of(stream)
    first, second = (ids(order.take(NUM_ROWS)) for _ in range(2))
    assert len(set(first)) == NUM_ROWS
    assert sorted(first) == sorted(second)
    assert first != second
    of_shards = [int(one.split(":")[1]) for one in first]
    sizes = [of_shards.count(shard) for shard in dict.fromkeys(of_shards)]
    assert sizes == [SHARD_SIZES[shard] for shard in dict.fromkeys(of_shards)]  # one after another
    numbers = [int(one.split(":")[2]) for one in first if one.split(":")[1] == "0"]
    assert [{*numbers[:3]}, {*numbers[3:6]}, {*numbers[6:]}] == [{0, 1, 2}, {3, 4, 5}, {6}]


def test_rows_that_were_looked_at_come_again_also_from_an_earlier_window(stream):
    order = order_of(stream)
    order.take(2)
    here = order.position()
    rows = ids(order.take(9))
    order.move_to(here)
    assert ids(order.take(9)) == rows


def test_a_saved_position_is_found_again_by_another_order_of_the_stream(stream):
    order = order_of(stream)
    for _ in range(6):  # into the second epoch
        state = order.state_dict()
        rows = ids(order.take(3))
        again = order_of(stream)
        again.load_state_dict(state)
        assert ids(again.take(3)) == rows


def test_a_filter_on_a_column_that_no_row_has_is_named(stream, caplog):
    order = order_of(replace(stream, where={"anwser": "3"}))
    absent = r"no row has the column 'anwser'; they have .*Did you mean answer\?"
    order.some_prompts(5)
    warning = caplog.messages[-1]
    assert re.fullmatch(f"data.where: among the first 5 rows {absent}", warning)
    with pytest.raises(UserError, match=f"Among the last rows read {absent}"):
        order.take(1)
