"""Engines and servers that ``lit-grpo doctor`` finds, and what it asks of them."""

from __future__ import annotations

import json
import socket
import sys

import pytest
from doctor_runs import doctor, engine
from http_answers import answering

from lit_grpo.__main__ import main


def test_a_server_that_does_not_answer_is_failed_and_not_asked_offline(capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        served = engine("VLLMServerEngine", urls=[url])
        exit_code, shown = doctor(capsys, served)
        assert exit_code == 1
        assert f"{url} does not answer as a server of VLLMServerEngine" in shown["engine"]
        assert "VLLM_SERVER_DEV_MODE=1" in shown["engine"]
        exit_code, shown = doctor(capsys, served, "--offline")
    assert exit_code == 0
    assert f"{url} not asked (--offline)" in shown["engine"]


def test_a_server_is_asked_for_its_version_model_and_length(capsys):
    replies = {
        "GET /health": {},
        "GET /weight_info": {"weight_version": "3"},
        "GET /version": {"version": "0.32.0"},
        "GET /v1/models": {"data": [{"id": "llama", "max_model_len": 5}]},
    }
    with answering(replies) as url:
        exit_code, shown = doctor(capsys, engine("VLLMServerEngine", urls=[url]))
    assert exit_code == 1
    assert f"{url} answers: version 0.32.0, model llama, weights" in shown["engine"]
    assert "Start it with --served-model-name policy." in shown["engine"]
    assert "the engine takes 5 tokens of prompt and completion together" in shown["engine"]


@pytest.mark.parametrize(
    ("logprob", "code", "said"),
    [
        (0.0, 0, "reports processed_logprobs, as its sampled tokens show"),
        (-0.1, 1, "reports raw_logprobs, but the run expects processed_logprobs"),
    ],
)
def test_a_server_is_asked_for_the_logprobs_that_it_reports(logprob, code, said, capsys):
    def generate(body):
        assert body["sampling_params"]["top_k"] == 1
        choice = {
            "index": 0,
            "token_ids": [7],
            "logprobs": {"content": [{"logprob": logprob}]},
            "finish_reason": "length",
            "weight_versions": [{"version": "3", "start": 0, "end": 1}],
        }
        return 200, f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode()

    replies = {
        "GET /health": {},
        "GET /weight_info": {"weight_version": "3"},
        "GET /v1/models": {"data": [{"id": "policy"}]},
        "POST /inference/v1/generate": generate,
    }
    with answering(replies) as url:
        exit_code, shown = doctor(capsys, engine("VLLMServerEngine", urls=[url]))
    assert f"{url} {said}" in shown["engine"]
    assert exit_code == code


def test_a_server_that_samples_nothing_is_a_remark(capsys):
    replies = {"GET /health": {}, "GET /weight_info": {"weight_version": "3"}}
    with answering(replies) as url:
        exit_code, shown = doctor(capsys, engine("VLLMServerEngine", urls=[url]))
    assert exit_code == 0
    assert "so which logprobs it reports is not known" in shown["engine"]


def test_groups_that_a_launched_server_refuses_are_an_error(capsys):
    launch = {"flags": {"max-num-seqs": 3}}
    arguments = [engine("VLLMServerEngine", launch=launch), "--model.group_size=4"]
    assert main(["doctor", "--config=base.yaml", *arguments]) != 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "model.group_size must be <= 3 with the max-num-seqs of the servers, got 4" in said
    assert "Set model.engine.init_args.launch.flags.max-num-seqs" in said


def test_a_server_that_cannot_be_launched_names_the_program(capsys):
    exit_code, shown = doctor(capsys, engine("VLLMServerEngine", launch={"python": "no/python"}))
    assert exit_code == 1
    assert "there is no program no/python" in shown["engine"]
    assert "Set model.engine.init_args.launch.python." in shown["engine"]
    exit_code, shown = doctor(
        capsys, engine("SGLangEngine", launch={"python": sys.executable}), "--trainer.max_steps=1"
    )
    assert "has no package sglang" in shown["engine"] or "sglang" in shown["engine"]


def test_sampling_that_an_engine_cannot_do_is_failed(capsys):
    exit_code, shown = doctor(
        capsys,
        engine("VLLMServerEngine", urls=["http://127.0.0.1:1"]),
        "--model.sampling.top_p=0.9",
    )
    assert exit_code == 1
    assert "top_p must be 1 and top_k 0 with vLLM" in shown["engine"]
