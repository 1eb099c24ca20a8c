"""The teacher behind vLLM servers: what it asks of them, and how it meets their failures.

The server is a real one over HTTP that answers in vLLM's format, from a model in this process.
`test_server_with_vllm` asks vLLM itself.
"""

import gc
import math
import threading
import time

import pytest
import torch
from http_answers import answering
from packed_batches import batch_of
from teacher_server import vllm_replies
from tiny import LLAMA, perturbed, tiny_policy, unbatched_logprobs

from lit_grpo.policy.teacher import TeacherFailed
from lit_grpo.rollout.vllm.teacher import VLLMTeacher
from lit_grpo.types import UserError

PROMPT = [49, 43, 49, 61]
BATCH = batch_of(PROMPT, [[7, 8, 9], [1]], PROMPT, [[2, 3], [4, 5]])


def loaded(url, *, policy=None, top_k=None, temperature=1.0, **settings):
    urls = [url] if isinstance(url, str) else url
    teacher = VLLMTeacher(urls, **({"give_up_after_seconds": 30} | settings))
    teacher.load(policy or tiny_policy(), temperature=temperature, top_k=top_k)
    return teacher


@pytest.fixture(scope="module")
def source():
    return perturbed(tiny_policy())


@pytest.fixture
def address(source):
    with answering(vllm_replies(source)) as url:
        yield url


def test_the_logprobs_are_those_of_the_completion_tokens(source, address):
    teacher = loaded(address)
    (logprobs,) = teacher.read(BATCH)
    for row in range(4):
        expected, _ = unbatched_logprobs(source.model, BATCH, row, 1.0)
        length = len(expected)
        torch.testing.assert_close(logprobs[row, :length], expected, rtol=0, atol=1e-5)
        assert not logprobs[row, length:].any()
    assert teacher.max_positions == 99  # one is left for the token that a request samples
    teacher.close()


def test_the_most_likely_tokens_are_those_of_the_policys_vocabulary():
    wider = perturbed(tiny_policy(architecture=LLAMA | {"vocab_size": 300}))
    with torch.no_grad():
        wider.model.get_output_embeddings().weight[258:] *= 3  # often among the most likely
    requests = []
    with answering(vllm_replies(wider), requests) as url:
        teacher = loaded(url, top_k=5)
        ids, logprobs = teacher.read(BATCH)
        teacher.close()
    asked = {body["prompt_logprobs"] for where, body in requests if "completions" in where}
    assert {5, 10} <= asked
    for row, length in enumerate(BATCH.completion_mask.sum(1).tolist()):
        text = torch.tensor([[*PROMPT, *BATCH.completion_ids[row, :length].tolist()]])
        with torch.no_grad():
            expected = wider.model(text).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        top = expected[:, :258].topk(5)
        assert ids[row, :length].tolist() == top.indices.tolist()
        torch.testing.assert_close(logprobs[row, :length], top.values, rtol=0, atol=1e-5)
        assert not ids[row, length:].any()


def test_rows_are_shared_by_the_servers_and_one_that_dies_is_replaced(source):
    first, second = [], []
    with answering(vllm_replies(source), second) as other:
        with answering(vllm_replies(source), first) as url:
            teacher = loaded([url, other])
            before = teacher.read(BATCH)
        assert len(first) == len(second) == 5  # models, tokens, the trial and two of four rows
        (again,) = teacher.read(BATCH)
        assert again.equal(before[0])
        assert len(second) == 9
        teacher.close()


def test_a_failure_is_repeated_until_the_server_answers_and_reported_once(source, caplog):
    replies, failures = vllm_replies(source), []
    complete = replies["POST /v1/completions"]

    def fail_twice(body):
        if len(failures) < 2 and len(body["prompt"]) < 8:
            failures.append(body)
            return 503, {"error": "busy"}
        return complete(body)

    with answering(replies | {"POST /v1/completions": fail_twice}) as url:
        teacher = loaded(url)
        (logprobs,) = teacher.read(BATCH)
        teacher.close()
    assert len(failures) == 2
    assert logprobs[0].all()
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "503" in caplog.text


def test_a_server_that_stays_away_is_an_error_that_says_for_how_long(source):
    with answering(vllm_replies(source)) as url:
        teacher = loaded(url, give_up_after_seconds=0.5)
    start = time.monotonic()
    with pytest.raises(TeacherFailed, match=r"did not read a completion for \d s: .*resume"):
        teacher.read(BATCH)
    assert time.monotonic() - start >= 0.5
    teacher.close()


def test_a_request_that_is_refused_is_not_repeated(source):
    replies, refused = vllm_replies(source), []

    def refuse(body):
        refused.append(body)
        return (400, {"error": "too long"}) if len(body["prompt"]) < 8 else complete(body)

    complete = replies["POST /v1/completions"]
    with answering(replies | {"POST /v1/completions": refuse}) as url:
        teacher = loaded(url)
        with pytest.raises(TeacherFailed, match="refused a completion: .*400.*too long"):
            teacher.read(BATCH)
        teacher.close()
    assert len(refused) <= 1 + len(BATCH.completion_ids)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda entries: entries.pop(), "2 logprobs for 3 tokens"),
        (lambda entries: entries[-1].popitem(), "KeyError"),
        (lambda entries: next(iter(entries[-1].values())).update(logprob=None), "TypeError"),
        (lambda entries: next(iter(entries[-1].values())).update(logprob=math.nan), "NaN"),
    ],
    ids=["a token is missing", "a logprob is missing", "null", "NaN"],
)
def test_a_reply_that_is_damaged_is_no_value(source, damage, why):
    replies = vllm_replies(source)
    complete = replies["POST /v1/completions"]

    def damaged(body):
        status, reply = complete(body)
        if len(body["prompt"]) == 7:
            damage(reply["choices"][0]["prompt_logprobs"])
        return status, reply

    with answering(replies | {"POST /v1/completions": damaged}) as url:
        teacher = loaded(url, give_up_after_seconds=0)
        with pytest.raises(TeacherFailed, match=why):
            teacher.read(BATCH)
        teacher.close()


def test_more_tokens_than_the_server_reports_are_refused_before_training(address):
    with pytest.raises(UserError, match=r"logprobs of 32 exceed 20.*--max-logprobs 32"):
        loaded(address, top_k=32)


def test_no_server_and_a_server_without_a_model_are_refused_before_training(recwarn):
    gc.collect()  # what earlier tests left
    recwarn.clear()
    unknown = pytest.raises(UserError, match=r"must answer before training.*unknown format")
    with answering({"GET /v1/models": {"object": "list"}}) as url, unknown:
        loaded(url)
    with pytest.raises(UserError, match=r"must answer before training.*model\.teacher.*urls"):
        loaded(url)
    gc.collect()
    assert not [one for one in recwarn if issubclass(one.category, ResourceWarning)]
    assert not [one for one in threading.enumerate() if one.name == "teacher"]


def test_another_tokenizer_is_refused(source):
    replies = vllm_replies(source) | {"POST /tokenize": {"tokens": [1, 2, 3]}}
    refused = pytest.raises(UserError, match=r"splits .* differently.*model\.teacher\.urls")
    with answering(replies) as url, refused:
        loaded(url)


def test_another_temperature_than_1_is_refused(address):
    with pytest.raises(UserError, match=r"temperature must be 1 with a teacher.*0\.7"):
        loaded(address, temperature=0.7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": []}, r"urls must be one address or more, .* Set model\.teacher\.urls"),
        ({"urls": ["10.0.0.2:8000"]}, r"must be http addresses .* Set model\.teacher\.urls"),
        ({"api_key_variable": "sk-1"}, r"Export the key and set model\.teacher\.api_key"),
        ({"request_timeout": 0}, r"request_timeout must be positive"),
        ({"max_concurrency": 0}, r"max_concurrency must be >= 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        VLLMTeacher(**({"urls": ["http://127.0.0.1:1"]} | settings))


def test_the_key_in_the_variable_is_sent(source, monkeypatch):
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with answering(vllm_replies(source)) as url:
        with pytest.raises(UserError, match=r"TEACHER_KEY .*set model\.teacher\.api_key"):
            loaded(url, api_key_variable="TEACHER_KEY")
        monkeypatch.setenv("TEACHER_KEY", "abc")
        teacher = loaded(url, api_key_variable="TEACHER_KEY")
        assert teacher._servers[0].endpoint.headers == {"Authorization": "Bearer abc"}
        teacher.close()


def test_the_wait_for_a_server_that_is_down_may_be_left(source):
    replies = vllm_replies(source)
    with answering(replies) as url:
        teacher = loaded(url, give_up_after_seconds=1000)
        replies["POST /v1/completions"] = lambda body: (500, {"error": "down"})
        teacher.on_wait = lambda: 1 // 0
        with pytest.raises(ZeroDivisionError):
            teacher.read(BATCH)
        teacher.close()
