import pytest
from chat_models import IM_END, qwen_policy
from tiny import LLAMA, prompt, tiny_policy
from transformers import AutoModelForCausalLM

from lit_grpo.policy import Policy
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rollout import Sampling
from lit_grpo.rollout.requests import (
    Sample,
    completion_text,
    group_requests,
    stop_token_ids,
    to_completion,
)
from lit_grpo.rollout.vllm.sampling import sampling_params


def test_seeds_are_consecutive_within_a_group_and_differ_between_groups():
    prompts = [prompt(text, id=text) for text in "abc"]
    requests = group_requests(tiny_policy(), prompts, 4, Sampling(), seed=1)
    for request in requests:
        first = request.seeds[0]
        assert dict(request.seeds) == {index: first + index for index in range(4)}
    assert len({seed for request in requests for seed in request.seeds.values()}) == 12
    again = group_requests(tiny_policy(), prompts, 4, Sampling(), seed=1)
    assert again == requests
    assert group_requests(tiny_policy(), prompts, 4, Sampling(), seed=2) != requests


def sample(**settings) -> Sample:
    return Sample(
        **{"token_ids": [72, 105], "logprobs": [-1.0, -2.0], "versions": ["3", "4"]} | settings
    )


def test_a_finished_sample_becomes_a_completion():
    found = to_completion(sample(finish_reason="stop"), byte_tokenizer(), Sampling())
    assert found.token_ids == (72, 105)
    assert found.sampler_logprobs == (-1.0, -2.0)
    assert found.policy_versions == (3, 4)


def test_a_sample_that_the_engine_cut_before_max_tokens_is_failed():
    cut = to_completion(sample(finish_reason="length"), byte_tokenizer(), Sampling(max_tokens=3))
    assert cut.is_failed
    assert cut.failure.startswith("cut at 2 tokens, before max_tokens=3")
    whole = to_completion(sample(finish_reason="length"), byte_tokenizer(), Sampling(max_tokens=2))
    assert whole.is_truncated


@pytest.mark.parametrize(
    "settings",
    [
        {"token_ids": []},
        {"logprobs": [-1.0]},
        {"logprobs": [-1.0, None]},
        {"logprobs": [-1.0, float("nan")]},
        {"versions": ["3"]},
    ],
    ids=str,
)
def test_a_sample_that_lacks_something_is_not_complete(settings):
    assert sample().is_complete
    assert not sample(**settings).is_complete


def test_a_saved_base_model_ends_a_turn_in_other_programs_too(tmp_path):
    policy = qwen_policy(tmp_path)
    policy.load(with_reference=False)
    policy.save_pretrained(tmp_path / "final")
    expected = policy.tokenizer.convert_tokens_to_ids(["<eos>", IM_END])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert loaded.generation_config.eos_token_id == expected
    again = Policy(str(tmp_path / "final"))
    again.load(with_reference=False)
    assert stop_token_ids(again, Sampling()) == expected


def test_a_saved_model_without_an_end_ends_with_that_of_its_tokenizer(tmp_path):
    policy = tiny_policy(architecture=LLAMA | {"eos_token_id": None})
    assert policy.model.generation_config.eos_token_id is None
    policy.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.eos_token_id == [policy.tokenizer.eos_token_id] == [256]


def test_stop_tokens_are_the_models_and_the_users():
    policy = tiny_policy()
    eos = policy.tokenizer.eos_token_id
    assert stop_token_ids(policy, Sampling(stop_token_ids=(7, eos))) == [7, eos]


def test_a_base_model_stops_at_the_end_of_text_and_at_the_end_of_a_turn(tmp_path):
    policy = qwen_policy(tmp_path)
    policy.load(with_reference=False)
    eos, end_of_turn = policy.tokenizer.convert_tokens_to_ids(["<eos>", IM_END])
    assert stop_token_ids(policy, Sampling()) == [eos, end_of_turn]
    (request,) = group_requests(policy, [prompt()], 2, Sampling(), seed=1)
    asked = sampling_params(request, num_samples=2, seed=1)
    assert asked["stop_token_ids"] == [eos, end_of_turn]
    assert not asked.get("ignore_eos")


def test_the_text_ends_before_the_first_stop_string_after_min_tokens():
    tokenizer = byte_tokenizer()
    tokens = tokenizer("a.b.c")["input_ids"]
    text = {
        count: completion_text(tokenizer, tokens, Sampling(stop=(".",), min_tokens=count))
        for count in (0, 2, 4)
    }
    assert text == {0: "a", 2: "a.b", 4: "a.b.c"}
