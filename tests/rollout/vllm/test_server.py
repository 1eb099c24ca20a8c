"""The command line of a vLLM server, and the requests of its API.

`test_server_with_vllm` has a real vLLM.
"""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from http_answers import answering

from lit_grpo.rollout import Launch, Sampling
from lit_grpo.rollout.requests import Request
from lit_grpo.rollout.server.api import ServedModel
from lit_grpo.rollout.server.endpoint import Endpoint, ServerError
from lit_grpo.rollout.vllm.nccl_transfer import NCCLTransfer
from lit_grpo.rollout.vllm.server import VLLMAPI
from lit_grpo.rollout.weights.store import WeightUpdate

MODEL = ServedModel(
    path="/models/small", tokenizer="/tokenizers/mine", dtype="bfloat16", adapter_rank=None
)
MODULE = ["-m", "vllm.entrypoints.openai.api_server", "--model"]


def command(model: ServedModel = MODEL, transfer=None, **launch) -> list[str]:
    return VLLMAPI("processed_logprobs", transfer).command(Launch(**launch), model, 8000)


def options(**settings) -> dict[str, str | bool]:
    """Return the options by name; True for one without a value."""
    words, found = command(**settings), {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            assert word not in found, f"{word} is there twice"
            found[word] = True if following.startswith("--") else following
    return found


ALWAYS = {
    "--model": "/models/small",
    "--tokenizer": "/tokenizers/mine",
    "--served-model-name": "policy",
    "--host": "127.0.0.1",
    "--port": "8000",
    "--dtype": "bfloat16",
    "--tensor-parallel-size": "1",
    "--data-parallel-size": "1",
    "--logprobs-mode": "processed_logprobs",
    "--enable-scale-out": True,
    "--uvicorn-log-level": "warning",
}


def test_settings_that_are_null_are_left_to_vllm():
    assert options() == ALWAYS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"memory_fraction": 0.4}, {"--gpu-memory-utilization": "0.4"}),
        ({"tensor_parallel_size": 4}, {"--tensor-parallel-size": "4"}),
        ({"data_parallel_size": 2}, {"--data-parallel-size": "2"}),
        ({"dtype": "float16"}, {"--dtype": "float16"}),
        ({"max_model_len": 4096}, {"--max-model-len": "4096"}),
        ({"host": "10.0.0.2"}, {"--host": "10.0.0.2"}),
        ({"flags": {"max-num-seqs": 64}}, {"--max-num-seqs": "64"}),
        ({"flags": {"enforce-eager": True}}, {"--enforce-eager": True}),
        ({"flags": {"hf-overrides": {"a": "b"}}}, {"--hf-overrides": '{"a": "b"}'}),
        ({"flags": {"uvicorn-log-level": "info"}}, {"--uvicorn-log-level": "info"}),
        (
            {"transfer": NCCLTransfer()},
            {"--weight-transfer-config": '{"backend": "nccl"}'},
        ),
    ],
    ids=lambda value: ", ".join(value),
)
def test_every_setting_reaches_the_command(settings, expected):
    assert options(**settings) == ALWAYS | expected


def test_a_flag_that_is_false_removes_an_option():
    left = {name: value for name, value in ALWAYS.items() if name != "--enable-scale-out"}
    assert options(flags={"enable-scale-out": False}) == left


def test_two_adapters_fit_since_running_requests_continue_with_the_previous_one():
    adapters = {"--enable-lora": True, "--max-lora-rank": "8", "--max-loras": "2"}
    assert options(model=replace(MODEL, adapter_rank=4)) == ALWAYS | adapters


def test_the_interpreter_of_another_environment_can_run_the_server():
    assert command()[:4] == [sys.executable, *MODULE]
    assert command(python="/envs/vllm/bin/python")[:4] == ["/envs/vllm/bin/python", *MODULE]


def test_a_program_replaces_interpreter_and_module():
    container = ["podman", "run", "--rm", "vllm"]
    assert command(program=container)[:5] == [*container, "--model"]


def at(url, method, *arguments):
    """Call a method of the API with an endpoint."""

    async def call():
        endpoint = Endpoint(url, 10)
        try:
            return await method(endpoint, *arguments)
        finally:
            await endpoint.close()

    return asyncio.run(call())


def update(version=3, *, is_adapter=False) -> WeightUpdate:
    return WeightUpdate(version=version, path=Path("/weights/v3"), is_adapter=is_adapter)


UPDATES = {"POST /pause": {}, "POST /resume": {}, "POST /collective_rpc": {}}
UPDATES |= {"POST /reset_prefix_cache": {"success": True}, "POST /update_weight_version": {}}


def test_full_weights_are_replaced_in_a_pause_and_labelled_before_its_end():
    seen = []
    with answering(UPDATES, seen) as url:
        at(url, VLLMAPI("processed_logprobs").update_weights, update(), 10)
    assert [what for what, _ in seen] == [
        "POST /pause?mode=keep",
        "POST /collective_rpc",
        "POST /reset_prefix_cache?reset_running_requests=true",
        "POST /update_weight_version",
        "POST /resume",
    ]
    assert seen[1][1] == {"method": "reload_weights", "kwargs": {"weights_path": "/weights/v3"}}
    assert seen[3][1] == {"new_version": "3"}


def test_an_update_without_a_reset_of_the_prefix_cache_fails():
    replies = UPDATES | {"POST /reset_prefix_cache": {"success": False}}
    with answering(replies) as url, pytest.raises(ServerError, match="prefix cache"):
        at(url, VLLMAPI("processed_logprobs").update_weights, update(), 10)


def test_an_adapter_replaces_one_with_the_same_name():
    seen, adapter = [], update(is_adapter=True)
    replies = {"POST /v1/load_lora_adapter": b"ok", "POST /update_weight_version": {}}
    with answering(replies, seen) as url:
        at(url, VLLMAPI("processed_logprobs").update_weights, adapter, 10)
    assert [what for what, _ in seen] == [
        "POST /v1/unload_lora_adapter",  # refused: there is none
        "POST /v1/load_lora_adapter",
        "POST /update_weight_version",
    ]
    assert seen[1][1] == {"lora_name": "policy-v3", "lora_path": "/weights/v3"}


def choice(index, token_ids, finish_reason=None):
    content = [{"logprob": -float(token)} for token in token_ids]
    spans = [{"version": 3, "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 3}]
    found = {"index": index, "token_ids": token_ids, "logprobs": {"content": content}}
    return found | {"finish_reason": finish_reason, "weight_versions": spans}


def read_samples(*events, adapter=None):
    """Return the samples of a request for two, and what the server was asked."""
    request = Request(
        token_ids=(1, 2),
        sampling=Sampling(max_tokens=3),
        stop_token_ids=(9,),
        seeds={4: 70, 5: 71},
        adapter=adapter,
    )
    lines = [f"data: {json.dumps({'choices': [event]})}\n\n" for event in events]
    stream = "".join([*lines, "data: [DONE]\n\n"]).encode()
    seen, found = [], {}

    async def read(endpoint):
        async for index, sample in VLLMAPI("processed_logprobs").stream(endpoint, request):
            found[index] = sample
        return found

    with answering({"POST /inference/v1/generate": stream}, seen) as url:
        samples = at(url, read)
    return samples, seen[0][1]


def test_samples_of_a_request_are_put_together_from_events():
    samples, body = read_samples(
        choice(0, [10, 11]), choice(1, [20], "stop"), choice(0, [12], "length")
    )
    assert samples[4].token_ids == [10, 11, 12]
    assert samples[4].logprobs == [-10, -11, -12]
    assert samples[4].versions == ["3", "4", "4"]
    assert (samples[4].finish_reason, samples[5].finish_reason) == ("length", "stop")
    assert body["model"] == "policy"
    assert (body["sampling_params"]["n"], body["sampling_params"]["seed"]) == (2, 70)


def test_tokens_of_an_adapter_have_its_version():
    events = [choice(0, [10, 11, 12], "length"), choice(1, [20], "stop")]
    samples, body = read_samples(*events, adapter=update(7, is_adapter=True))
    assert body["model"] == "policy-v7"
    assert samples[4].versions == ["7"] * 3


def test_a_stream_that_ends_before_its_samples_fails():
    with pytest.raises(ServerError, match="ended before"):
        read_samples(choice(0, [10], "stop"))


def test_a_sample_that_the_server_aborted_fails():
    with pytest.raises(ServerError, match="'abort'"):
        read_samples(choice(0, [10], "abort"))
