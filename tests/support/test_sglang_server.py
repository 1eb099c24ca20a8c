"""The test server for SGLang behaves as documented; transformers and peft are the reference."""

import json
import signal
import socket
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from paths import SUPPORT
from peft import LoraConfig, get_peft_model
from processes import running
from sglang_server import RunningServer, running_server
from tiny import tiny_policy
from transformers import AutoModelForCausalLM, DynamicCache
from worker_processes import is_alive, wait_until

from lit_grpo.rollout.hf.row_cache import cache_name

PROMPT = list(b"1+1=")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Two models with different weights, "default" and "v1", and an adapter for the first."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("default", "v1", "adapter")}
    for seed, name in enumerate(("default", "v1")):
        tiny_policy(seed=seed).save_pretrained(found[name])
    torch.manual_seed(2)
    settings = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(load(found["default"]), settings).save_pretrained(found["adapter"])
    return found


@pytest.fixture(scope="module")
def shared(directories):
    lora = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    flags = {"enable_deterministic_inference": True} | lora
    with running_server(directories["default"], **flags) as server:
        yield server


@pytest.fixture(scope="module")
def other(directories):
    names = ("incremental_streaming_output", "skip_tokenizer_init", "enable_memory_saver")
    with running_server(directories["default"], **dict.fromkeys(names, True)) as server:
        yield server


@pytest.fixture
def server(shared, directories):
    """The shared server; faults and weights are reset after the test."""
    yield shared
    shared.faults()
    shared.post("/continue_generation")
    shared.post("/abort_request", abort_all=True)
    assert update(shared, directories["default"], "default")[0] == 200


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def update(server: RunningServer, directory, version: str):
    return server.post(
        "/update_weights_from_disk", model_path=str(directory), weight_version=version
    )


def body(*, prompt=PROMPT, max_new_tokens=12, sampling_seed=1, more=(), **sampling):
    sampling |= {"max_new_tokens": max_new_tokens, "sampling_seed": sampling_seed}
    given = {"input_ids": prompt, "sampling_params": {"ignore_eos": True} | sampling}
    return given | {"return_logprob": True} | dict(more)


def generate(server: RunningServer, **settings):
    status, reply = server.post("/generate", **body(**settings))
    assert status == 200, reply
    return reply


def stream(server: RunningServer, **settings):
    """Yield the events as they arrive."""
    data = json.dumps(body(**settings) | {"stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/generate", data=data)
    with urllib.request.urlopen(request, timeout=60) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def logprobs(reply):
    return torch.tensor([value for value, _, _ in reply["meta_info"]["output_token_logprobs"]])


@torch.no_grad()
def scored(model, prompt, completion, temperature=1.0):
    """Return [C] logprobs of one plain forward pass."""
    ids = torch.tensor([prompt + completion])
    full = (model(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return full.gather(1, torch.tensor(completion)[:, None])[:, 0]


def is_close(left, right):
    return torch.allclose(left, right, atol=1e-4)


def test_logprobs_are_those_at_the_temperature_before_top_p_and_top_k(server, directories):
    reply = generate(server, temperature=0.7, top_p=0.8, top_k=20)
    expected = scored(load(directories["default"]), PROMPT, reply["output_ids"], 0.7)
    assert is_close(logprobs(reply), expected)
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_a_greedy_completion_is_the_most_likely_and_is_scored_at_temperature_one(
    server, directories
):
    reply = generate(server, temperature=0)
    model = load(directories["default"])
    assert is_close(logprobs(reply), scored(model, PROMPT, reply["output_ids"]))
    logits = model(torch.tensor([PROMPT + reply["output_ids"]])).logits[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == reply["output_ids"]


def test_logprobs_of_the_prompt_ignore_the_temperature(server, directories):
    reply = generate(server, temperature=0.5, max_new_tokens=0, more={"logprob_start_len": 0})
    first, *rest = reply["meta_info"]["input_token_logprobs"]
    assert first == [None, PROMPT[0], None]
    expected = scored(load(directories["default"]), PROMPT[:1], PROMPT[1:])
    assert is_close(torch.tensor([value for value, _, _ in rest]), expected)
    assert reply["output_ids"] == []


def test_tokens_are_sampled_within_top_k_and_top_p(server, directories):
    ids = generate(server, top_k=3, max_new_tokens=40)["output_ids"]
    logits = load(directories["default"])(torch.tensor([PROMPT + ids])).logits[0]
    ranks = logits[len(PROMPT) - 1 : -1].argsort(descending=True) == torch.tensor(ids)[:, None]
    assert set(ranks.nonzero()[:, 1].tolist()) == {0, 1, 2}
    greedy = generate(server, temperature=0)
    assert generate(server, top_p=1e-6)["output_ids"] == greedy["output_ids"]


def test_the_seed_fixes_the_completion_and_is_shared_by_all_n_samples(server):
    first, second = generate(server, n=2)
    assert first["output_ids"] == second["output_ids"] == generate(server)["output_ids"]
    assert generate(server, sampling_seed=2)["output_ids"] != first["output_ids"]


def test_without_deterministic_inference_seeds_have_no_effect(other):
    assert generate(other)["output_ids"] != generate(other)["output_ids"]


def test_events_may_be_increments(other):
    chunks = list(stream(other, max_new_tokens=5))
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1] * 5
    assert [len(chunk["meta_info"]["output_token_logprobs"]) for chunk in chunks] == [1] * 5
    assert [chunk["meta_info"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5]


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string(other):
    assert "text" not in generate(other)
    status, reply = other.post("/generate", **body(stop="a"))
    assert status == 400
    assert "tokenizer" in reply["error"]["message"]


def test_a_stream_repeats_the_whole_output_in_each_event(server):
    events = list(stream(server, max_new_tokens=4))
    ids = generate(server, max_new_tokens=4)["output_ids"]
    assert [event["output_ids"] for event in events] == [ids[:end] for end in (1, 2, 3, 4)]
    assert [event["meta_info"]["finish_reason"] for event in events[:3]] == [None] * 3


def test_a_stop_token_stays_in_the_ids_and_a_stop_string_leaves_the_text(server):
    ids = generate(server)["output_ids"]
    by_token = generate(server, stop_token_ids=[ids[3]], ignore_eos=False)
    assert by_token["output_ids"] == ids[: ids.index(ids[3]) + 1]
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[3]}
    whole = generate(server, max_new_tokens=40)
    letter = next(one for one in whole["text"] if one.isascii() and one.isalnum())
    by_string = generate(server, max_new_tokens=40, stop=letter)
    num_kept = len(by_string["output_ids"])
    assert by_string["output_ids"] == whole["output_ids"][:num_kept]
    assert num_kept < 40
    assert by_string["text"] == whole["text"].split(letter)[0]
    assert by_string["meta_info"]["finish_reason"] == {"type": "stop", "matched": letter}


def test_no_stop_token_is_sampled_before_min_new_tokens(server):
    stops = {"stop_token_ids": list(range(200)), "ignore_eos": False}
    assert len(generate(server, **stops)["output_ids"]) < 8
    held_back = generate(server, min_new_tokens=8, **stops)["output_ids"]
    assert len(held_back) >= 8
    assert min(held_back[:8]) >= 200


def test_new_weights_change_the_completion_and_the_version(server, directories):
    before = generate(server)
    assert update(server, directories["v1"], "v1")[0] == 200
    after = generate(server)
    assert is_close(logprobs(after), scored(load(directories["v1"]), PROMPT, after["output_ids"]))
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_versions"] == [{"version": "v1", "start": 0, "end": 12}]
    assert server.get("/model_info")[1]["weight_version"] == "v1"


def test_weights_that_cannot_be_read_are_refused_and_the_old_ones_stay(server, tmp_path):
    before = generate(server)
    status, reply = update(server, tmp_path, "v1")
    assert (status, reply["success"]) == (400, False)
    assert generate(server)["output_ids"] == before["output_ids"]
    assert generate(server)["meta_info"]["weight_version"] == "default"


def test_an_adapter_answers_under_its_name_until_it_is_unloaded(server, directories):
    adapter = {"lora_name": "policy-v1", "lora_path": str(directories["adapter"])}
    assert server.post("/load_lora_adapter", **adapter)[0] == 200
    assert server.post("/load_lora_adapter", **adapter)[0] == 400
    base, adapted = load(directories["default"]), load(directories["default"])
    adapted.load_adapter(directories["adapter"])
    asked = {"more": {"lora_path": "policy-v1"}}
    for settings, model in (asked, adapted), ({}, base), (asked, adapted):
        reply = generate(server, **settings)
        assert is_close(logprobs(reply), scored(model, PROMPT, reply["output_ids"]))
    assert server.post("/unload_lora_adapter", lora_name="policy-v1")[0] == 200
    assert server.post("/generate", **body(**asked))[0] == 400


def test_a_stale_adapter_answers_as_the_base_model(server, directories):
    server.faults(stale_updates=1)
    server.post("/load_lora_adapter", lora_name="stale", lora_path=str(directories["adapter"]))
    reply = generate(server, more={"lora_path": "stale"})
    assert reply["output_ids"] == generate(server)["output_ids"]
    assert server.post("/unload_lora_adapter", lora_name="stale")[0] == 200


def change_during_request(server, directories, mode):
    """Change the weights during a request, in a pause of this mode; return its last event."""
    server.faults(hold_after_tokens=5)
    events = stream(server, max_new_tokens=30)
    for _ in range(5):
        next(events)
    assert server.post("/pause_generation", mode=mode)[0] == 200
    server.faults()
    status, reply = update(server, directories["v1"], "v1")
    assert reply["success"] is (mode == "retract"), "in place the cache cannot be flushed"
    server.post("/continue_generation")
    *_, last = events
    (before, after) = last["meta_info"]["weight_versions"]
    assert (before["version"], after["version"]) == ("default", "v1")
    assert (before["end"], after["start"], after["end"]) == (5, 5, 30)
    old = load(directories["default"])
    expected = scored(old, PROMPT, last["output_ids"])[: before["end"]]
    assert is_close(logprobs(last)[: before["end"]], expected)
    return last, before["end"]


def test_a_retracted_request_continues_as_with_the_new_weights_alone(server, directories):
    last, split = change_during_request(server, directories, "retract")
    new = scored(load(directories["v1"]), PROMPT, last["output_ids"])
    assert is_close(logprobs(last)[split:], new[split:])
    assert last["meta_info"]["num_retractions"] == 1


def test_a_request_frozen_in_place_continues_with_new_weights_and_the_old_cache(
    server, directories
):
    last, split = change_during_request(server, directories, "in_place")
    ids, cache = torch.tensor([PROMPT + last["output_ids"]]), DynamicCache()
    num_old = len(PROMPT) + split - 1
    old, new = load(directories["default"]), load(directories["v1"])
    kept = {cache_name(old): cache}
    with torch.no_grad():
        old(ids[:, :num_old], **kept)
        logits = new(ids[:, num_old:-1], **kept).logits[0]
    expected = logits.log_softmax(-1).gather(1, ids[0, num_old + 1 :, None])[:, 0]
    assert is_close(logprobs(last)[split:], expected)
    new_logprobs = scored(new, PROMPT, last["output_ids"])
    assert not is_close(logprobs(last)[split:], new_logprobs[split:])
    assert last["meta_info"]["num_retractions"] == 0


def test_a_pause_that_aborts_returns_partial_output_and_makes_new_requests_wait(server):
    server.faults(hold_after_tokens=3)
    events = stream(server, max_new_tokens=100)
    next(events)
    assert server.post("/pause_generation", mode="abort")[0] == 200
    *_, last = events
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 1 <= len(last["output_ids"]) <= 3
    assert server.get("/health")[0] == 503
    with ThreadPoolExecutor() as pool:
        later = pool.submit(generate, server, max_new_tokens=2)
        wait_until(lambda: server.log()["generating"] == 1)
        assert not later.done()
        server.post("/continue_generation")
        assert len(later.result(60)["output_ids"]) == 2


def num_updates(server):
    return server.log()["requests"].get("/update_weights_from_disk", 0)


def test_weights_wait_for_running_requests_unless_the_server_is_paused(server, directories):
    server.faults(hold_after_tokens=3)
    so_far = num_updates(server)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate, server, max_new_tokens=30)
        wait_until(lambda: server.log()["held"] == 1)
        updated = pool.submit(update, server, directories["v1"], "v1")
        wait_until(lambda: num_updates(server) > so_far)
        server.faults()
        assert updated.result(60)[1]["success"]
        spans = running.result(60)["meta_info"]["weight_versions"]
    assert spans == [{"version": "default", "start": 0, "end": 30}]


@contextmanager
def connected(server, request):
    """Send a request, and yield its connection."""
    data = json.dumps(request).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + data)
        yield client


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_disconnects_aborts_its_request(server, is_stream):
    dropped = server.log()["dropped"]
    server.faults(hold_after_tokens=3)
    with connected(server, body(max_new_tokens=100) | {"stream": is_stream}):
        wait_until(lambda: server.log()["held"] == 1)
    wait_until(lambda: server.log()["generating"] == 0)
    assert server.log()["dropped"] == dropped + 1


def test_requests_run_concurrently(server):
    server.reset_count()
    server.faults(hold_after_tokens=3)
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(generate, server, sampling_seed=seed) for seed in range(8)]
        wait_until(lambda: server.log()["held"] == 8)
        server.faults()
    assert [len(reply.result()["output_ids"]) for reply in replies] == [12] * 8
    assert server.log()["most_unfinished"] == 8


def test_an_aborted_request_returns_its_partial_output(server):
    server.faults(hold_after_tokens=3)
    events = stream(server, max_new_tokens=100, more={"rid": "mine"})
    next(events)
    server.post("/abort_request", rid="mine")
    *_, last = events
    assert last["meta_info"]["id"] == "mine"
    assert last["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"top_k": 0}, "top_k"),
        ({"seed": 1}, "seed"),
        ({"prompt": [1] * 200}, "context length"),
        ({"max_new_tokens": 200}, "context length"),
        ({"more": {"lora_path": "unknown"}}, "unknown"),
    ],
)
def test_requests_that_sglang_refuses_are_refused(server, settings, words):
    status, reply = server.post("/generate", **body(**settings))
    assert status == 400
    assert words in json.dumps(reply)


def test_statuses_are_answered_in_order_and_then_cleared(server):
    server.faults(generate_statuses=[503, 400])
    assert [server.post("/generate", **body())[0] for _ in range(3)] == [503, 400, 200]


def test_a_hanging_call_is_never_answered_and_a_cut_one_is_disconnected(server):
    server.faults(hang_generate=1, cut_generate=2)
    with connected(server, body()) as client:
        wait_until(lambda: server.log()["generating"] == 1)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
    with pytest.raises(OSError):  # noqa: PT011 - the kernel words it in several ways
        server.post("/generate", **body())
    events = stream(server)
    assert len([next(events), next(events, None)]) == 2
    assert len(generate(server)["output_ids"]) == 12


def test_a_stale_update_changes_the_label_only_and_a_refused_one_nothing(server, directories):
    before = generate(server)
    server.faults(stale_updates=1, refuse_updates=1)
    assert update(server, directories["v1"], "v1")[0] == 400
    assert generate(server)["meta_info"]["weight_version"] == "default"
    assert update(server, directories["v1"], "v1")[0] == 200
    after = generate(server)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "v1"


def test_a_false_label_and_failed_health_checks_are_reported(server):
    server.faults(weight_version="v9", unhealthy_checks=2)
    assert generate(server)["meta_info"]["weight_versions"][0]["version"] == "v9"
    assert server.get("/model_info")[1]["weight_version"] == "v9"
    assert [server.get("/health")[0] for _ in range(3)] == [503, 503, 200]


def test_a_server_that_is_never_healthy_reports_it_and_is_gone_afterwards(directories):
    with running_server(directories["default"], never_healthy=True) as server:
        assert server.get("/health")[0] == 503
    assert not is_alive(server.pid)


RUNNER = """
import sys, time
from sglang_server import running_server

with running_server(sys.argv[1]) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_a_test_runner_that_a_signal_ends(directories, signum):
    words = [sys.executable, "-c", RUNNER, str(directories["default"])]
    with running(words, PYTHONPATH=str(SUPPORT)) as runner:
        server = int(runner.stdout.readline())
        assert is_alive(server)
        runner.send_signal(signum)
        wait_until(lambda: not is_alive(server))


def test_an_api_key_in_a_file_of_options_is_required_on_all_paths_but_health_checks(
    directories, tmp_path
):
    options = tmp_path / "options.yaml"
    options.write_text('{"api-key": "k"}')
    with running_server(directories["default"], config=options) as server:
        assert server.get("/model_info") == (401, {"error": "Unauthorized"})
        assert server.post("/update_weights_from_disk")[0] == 401
        assert server.get("/health")[0] == 200
        server.headers = {"Authorization": "Bearer k"}
        assert server.get("/model_info")[0] == 200


def test_a_server_that_cannot_start_reports_why(tmp_path):
    with pytest.raises(RuntimeError, match="config.json"), running_server(tmp_path):
        pass


def test_released_weights_are_lost(other, directories):
    before = generate(other, temperature=0)
    for step in "release", "resume":
        assert other.post(f"/{step}_memory_occupation", tags=["weights"]) == (200, None)
    assert generate(other, temperature=0)["output_ids"] != before["output_ids"]
    update(other, directories["default"], "again")
    assert generate(other, temperature=0)["output_ids"] == before["output_ids"]
