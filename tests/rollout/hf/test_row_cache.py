import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_policy
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from lit_grpo.rollout.hf.row_cache import INITIAL_TOKENS, RowCache, cache_name

CPU = torch.device("cpu")


def states(*numbers: float, length: int = 1) -> torch.Tensor:
    """Return [R, 1, length, 1], one number per row."""
    return torch.tensor(numbers)[:, None, None, None].expand(-1, 1, length, 1)


def test_rows_are_copies_of_their_prompt_and_take_tokens_after_it():
    prefilled = DynamicCache()
    prefilled.update(states(1, 2, length=3), states(-1, -2, length=3), 0)
    rows = RowCache(prefilled, torch.tensor([0, 0, 1]), max_tokens=4)
    keys, values = rows.cache.update(states(5, 6, 7), states(-5, -6, -7), 0)
    assert keys[:, 0, :, 0].tolist() == [[1, 1, 1, 5], [1, 1, 1, 6], [2, 2, 2, 7]]
    assert torch.equal(values, -keys)
    assert rows.cache.get_seq_length() == 4


def test_a_removed_row_is_replaced_by_one_of_the_last():
    prefilled = DynamicCache()
    prefilled.update(states(0, 1, 2, 3, 4), states(0, 1, 2, 3, 4), 0)
    rows = RowCache(prefilled, torch.arange(5), max_tokens=4)
    now = rows.drop(torch.tensor([False, True, False, True, True]), CPU)
    assert sorted(now.tolist()) == [1, 3, 4]
    keys, _ = rows.cache.update(states(*now.tolist()), states(*now.tolist()), 0)
    assert keys[:, 0].tolist() == [[[row], [row]] for row in now.tolist()]
    assert rows.drop(torch.tensor([True, False, False]), CPU).tolist() == [0]


def test_the_capacity_grows_and_tokens_stay():
    prefilled = DynamicCache()
    prefilled.update(states(1), states(1), 0)
    rows = RowCache(prefilled, torch.tensor([0]), max_tokens=3 * INITIAL_TOKENS)
    for number in range(3 * INITIAL_TOKENS):
        keys, _ = rows.cache.update(states(number), states(number), 0)
    assert keys.flatten().tolist() == [1, *range(3 * INITIAL_TOKENS)]


class ModelWithItsOwnCode(PreTrainedModel):
    def forward(self, input_ids=None, past_key_values=None):
        return input_ids


def test_a_model_takes_its_cache_under_the_name_of_its_forward():
    model = tiny_policy().model
    name = cache_name(model)
    cache = DynamicCache()
    output = model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=True, **{name: cache})
    assert getattr(output, name) is cache
    assert cache.get_seq_length() == 3
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert cache_name(adapted) == name
    assert cache_name(ModelWithItsOwnCode(PreTrainedConfig())) == "past_key_values"


def test_keys_have_the_type_that_autocast_computes_in():
    """A rotation by cosines in float32 leaves keys in float32 beside values in bfloat16."""
    prefilled = DynamicCache()
    prefilled.update(states(1, length=3), states(1, length=3).bfloat16(), 0)
    with torch.autocast("cpu", torch.bfloat16):
        rows = RowCache(prefilled, torch.tensor([0, 0]), max_tokens=4)
        keys, values = rows.cache.update(states(2, 3), states(2, 3).bfloat16(), 0)
    assert keys.dtype == values.dtype == torch.bfloat16
    assert torch.equal(keys, values)
