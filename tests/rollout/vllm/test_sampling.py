import pytest

from lit_grpo.rollout import Sampling
from lit_grpo.rollout.requests import Request
from lit_grpo.rollout.vllm.sampling import check_sampling, max_adapter_rank, sampling_params


@pytest.mark.parametrize(("rank", "expected"), [(1, 1), (4, 8), (8, 8), (33, 64), (400, 512)])
def test_an_adapter_gets_the_smallest_max_lora_rank_that_vllm_allows(rank, expected):
    assert max_adapter_rank(rank) == expected


def test_an_adapter_with_a_larger_rank_than_vllm_allows_is_refused():
    with pytest.raises(
        ValueError, match=r"<= 512, got 513 .*weight_sync full\)\. Set model\.policy\.lora\.rank"
    ):
        max_adapter_rank(513)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"top_p": 0.9}, "processed_logprobs"),
        ({"top_k": 5}, "processed_logprobs"),
        ({"temperature": 0.7}, "raw_logprobs"),
    ],
)
def test_sampling_with_logprobs_that_cannot_be_compared_is_refused(settings, mode):
    with pytest.raises(ValueError, match="model.engine.init_args.logprobs_mode"):
        check_sampling(Sampling(**settings), mode)


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"temperature": 0, "top_p": 0.9}, "processed_logprobs"),
        ({"top_p": 0.9, "top_k": 5}, "raw_logprobs"),
    ],
)
def test_other_sampling_is_accepted(settings, mode):
    check_sampling(Sampling(**settings), mode)


def test_a_temperature_above_that_of_vllm_is_refused():
    with pytest.raises(ValueError, match=r"sampling\.temperature must be <= 2, got 2\.5"):
        check_sampling(Sampling(temperature=2.5), "processed_logprobs")


def test_sampling_parameters_have_vllms_names():
    sampling = Sampling(max_tokens=5, top_k=3, stop=("a",))
    request = Request(token_ids=(1,), sampling=sampling, stop_token_ids=(9,), seeds={0: 7, 1: 8})
    params = sampling_params(request, num_samples=2, seed=7)
    expected = {"n": 2, "seed": 7, "max_tokens": 5, "top_k": 3, "stop": ["a"], "logprobs": 0}
    assert expected.items() <= params.items()
    assert params["stop_token_ids"] == [9]
    assert params["detokenize"]
