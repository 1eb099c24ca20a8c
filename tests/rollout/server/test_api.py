import pytest

from lit_grpo.rollout import Launch, Sampling
from lit_grpo.rollout.requests import Request
from lit_grpo.rollout.server.api import as_flags, token_versions
from lit_grpo.rollout.sglang import SGLangAPI
from lit_grpo.rollout.vllm.server import VLLMAPI


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_servers", 0),
        ("tensor_parallel_size", 0),
        ("data_parallel_size", -1),
        ("port", 0),
        ("devices", ["0"]),
        ("devices", ["0", "1", "2"]),
        ("devices", []),
    ],
)
def test_a_launch_out_of_range_is_refused_with_the_name_of_its_setting(setting, value):
    with pytest.raises(ValueError, match=rf"launch\.{setting} must"):
        Launch(**{"num_servers": 2, setting: value})


def test_options_become_flags():
    options = {"a": 1, "b": None, "c": False, "d": True, "e": ["x", "y"], "f": {"g": 2}}
    words = ["--a", "1", "--d", "--e", "x", "y", "--f", '{"g": 2}']
    assert as_flags(options) == words


def request(seeds, **sampling):
    return Request(
        token_ids=(1,), sampling=Sampling(**sampling), stop_token_ids=(), seeds=dict(seeds)
    )


def split(api, one):
    return [dict(part.seeds) for part in api.split(one)]


def test_a_request_is_split_at_gaps_between_its_seeds_if_the_server_counts_them():
    vllm, gaps = VLLMAPI("processed_logprobs"), {0: 10, 1: 11, 3: 13, 4: 14}
    assert split(vllm, request(gaps)) == [{0: 10, 1: 11}, {3: 13, 4: 14}]
    assert split(SGLangAPI(), request(gaps)) == [{0: 10}, {1: 11}, {3: 13}, {4: 14}]
    assert len(split(vllm, request(gaps, temperature=0))) == 4


def test_tokens_have_the_servers_labels_or_the_adapters():
    spans = [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 3}]
    assert token_versions(spans, 3, None) == ["3", "3", "4"]
