"""Requests are shared among servers; those that fail are retried, refused ones are not."""

from concurrent.futures import ThreadPoolExecutor

from served_engines import (
    PLAIN,
    PROMPTS,
    SEEDED,
    assert_same,
    generate,
    generating,
    serving,
    wait_until_ready,
)
from sglang_server import running_server
from tiny import prompt
from worker_processes import wait_until


def test_a_refused_request_is_failed_and_not_retried(policy, server):
    too_long = prompt("y" * 120)
    with serving(policy, urls=[server.url]) as engine:
        before = server.log()["requests"]["/generate"]
        completions = generate(engine, [PROMPTS[0], too_long], PLAIN, group_size=2)
        assert server.log()["requests"]["/generate"] == before + 4
        assert engine.observe().totals["rollout/retries"] == 0
    assert [completion.is_failed for completion in completions] == [False, False, True, True]
    assert "context length" in completions[2].failure
    assert completions[2].token_ids == ()


def test_a_status_400_is_a_refusal(policy, server):
    with serving(policy, urls=[server.url]) as engine:
        server.faults(generate_statuses=[400])
        completions = generate(engine, PROMPTS, PLAIN)
    assert [completion.is_failed for completion in completions].count(True) == 1


def test_a_failed_request_is_retried_whatever_its_status(policy, server, undisturbed):
    with serving(policy, urls=[server.url]) as engine:
        server.faults(generate_statuses=[500, 503, 429])
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        assert engine.observe().totals["rollout/retries"] == 3


def test_a_request_that_fails_too_often_is_failed(policy, server):
    with serving(policy, urls=[server.url], request_retries=1) as engine:
        server.faults(generate_statuses=[500, 500])
        (completion,) = generate(engine, PROMPTS[:1], PLAIN, group_size=1)
    assert completion.is_failed
    assert "2 attempts failed, the last one with: POST /generate: 500" in completion.failure


def test_a_request_without_an_answer_is_retried(policy, server, undisturbed):
    # Other requests, and the check of the weights, may time out as well on a busy machine.
    patient = {"request_retries": 20, "supervision": {"max_restarts": 20}}
    with serving(policy, urls=[server.url], request_timeout=2.0, **patient) as engine:
        engine.observe()
        server.faults(hang_generate=3)
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        assert engine.observe().totals["rollout/restarts"] == 0


def test_completions_that_a_broken_stream_left_unfinished_come_out_the_same(
    policy, server, undisturbed
):
    with serving(policy, urls=[server.url]) as engine:
        before = server.log()["requests"]["/generate"]
        server.faults(cut_generate=5)
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        assert server.log()["requests"]["/generate"] == before + 12 + 5


def test_no_more_completions_than_max_concurrency_run_at_once(policy, directory):
    with (
        running_server(directory, **SEEDED) as fresh,
        serving(policy, urls=[fresh.url], max_concurrency=3) as engine,
    ):
        before = fresh.log()["requests"]["/generate"]
        fresh.reset_count()  # the limit does not apply to weight checks
        fresh.faults(hold_after_tokens=1)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(generate, engine, PROMPTS, PLAIN, group_size=8)
            wait_until(lambda: fresh.log()["held"] == 3)
            pending = f"3 completions are at {fresh.url}, 21 wait for a server"
            assert engine.describe_pending() == pending
            fresh.faults()
            running.result(60)
            assert engine.describe_pending().startswith("0 completions are at")
        after = fresh.log()
        assert after["requests"]["/generate"] == before + 24
        assert after["most_unfinished"] == 3


def test_tokens_of_unfinished_completions_are_counted_while_they_are_streamed(policy, server):
    with serving(policy, urls=[server.url]) as engine, generating(engine, [server]) as running:
        wait_until(lambda: engine.num_unfinished_tokens == 12 * 3)
        server.faults()
        running.result(60)
        assert engine.num_unfinished_tokens == 0


def test_two_servers_share_the_load(policy, two):
    with serving(policy, urls=[server.url for server in two]) as engine:
        wait_until_ready(engine)
        before = [server.log()["requests"]["/generate"] for server in two]
        for server in two:
            server.faults(token_delay_seconds=0.02)
        generate(engine, PROMPTS, PLAIN, group_size=8)
        after = [server.log()["requests"]["/generate"] for server in two]
    shares = [now - then for now, then in zip(after, before, strict=True)]
    assert sum(shares) == 24
    assert min(shares) >= 8
