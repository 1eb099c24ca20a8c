"""Servers die, or never become ready: they are restarted and no completion is lost or doubled.

Real processes, real kills, real HTTP and a real tiny model.
"""

import os
import signal

import pytest
from served_engines import (
    LONG,
    PLAIN,
    PROMPTS,
    SEEDED,
    assert_same,
    failure_of,
    generate,
    generating,
    launch,
    launched_servers,
    serving,
    wait_until_ready,
)
from sglang_server import free_port, running_server

from lit_grpo.rollout import EngineFailed


@pytest.mark.slow
def test_a_server_killed_while_generating_is_restarted_and_every_row_delivered(policy, undisturbed):
    with serving(policy, launch=launch()) as engine:
        (server,) = launched_servers()
        with generating(engine, [server]) as running:
            os.kill(server.pid, signal.SIGKILL)
            completions = running.result(120)
        assert_same(completions, undisturbed[LONG])
        observed = engine.observe()
        assert observed.totals["rollout/restarts"] == 1
        assert observed.totals["rollout/retries"] >= 12
        assert (
            len(observed.means["sampler/weight_check_difference"]) == 2
        )  # one more after the restart
        assert [other.pid for other in launched_servers()] != [server.pid]


def test_another_server_takes_over_the_requests_of_a_killed_one(
    policy, server, directory, undisturbed
):
    """Even if no retries are allowed, since the requests are not at fault."""
    with (
        running_server(directory, **SEEDED) as other,
        serving(policy, urls=[server.url, other.url], request_retries=0) as engine,
    ):
        wait_until_ready(engine)
        with generating(engine, [server, other]) as running:
            assert [one.log()["held"] for one in (server, other)] == [6, 6]
            other.kill()
            server.faults()
            completions = running.result(60)
        assert_same(completions, undisturbed[LONG])


@pytest.mark.slow
def test_a_server_that_was_restarted_from_outside_gets_its_weights_again(
    policy, directory, undisturbed
):
    port = free_port()
    patient = {"max_restarts": 50}
    with running_server(directory, port=port, **SEEDED) as first:
        url = f"http://127.0.0.1:{port}"
        with serving(policy, urls=[url], supervision=patient) as engine:
            first.kill()
            with running_server(directory, port=port, **SEEDED):
                assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])


def test_the_last_server_that_is_abandoned_fails_the_requests_that_are_running(policy, directory):
    """Including those at their last attempt, which wait for a health check of their server."""
    settings = {"request_retries": 0, "supervision": {"max_restarts": 0}}
    with (
        running_server(directory, **SEEDED) as other,
        serving(policy, urls=[other.url], **settings) as engine,
        generating(engine, [other]) as running,
    ):
        other.kill()
        with pytest.raises(EngineFailed, match="was reconnected to 0 times in a row"):
            running.result(60)


def test_a_server_that_cannot_start_fails_the_engine_with_the_end_of_its_log(policy):
    broken = launch(flags={"no-such-flag": 1})
    why = failure_of(policy, launch=broken, supervision={"max_restarts": 1})
    assert "was restarted 1 times in a row and is still unhealthy: it exited before" in why
    assert "The end of its log:\n" in why
    assert "unrecognized arguments: --no-such-flag" in why
    assert why.count("\n") <= 17
    assert not launched_servers()


def test_a_missing_program_fails_the_engine_with_the_key_to_set(policy, traces):
    missing = launch(program=["no-such-program"])
    why = failure_of(policy, launch=missing, supervision={"max_restarts": 0})
    assert "'no-such-program' could not be started" in why
    assert "launch.python or .program" in why
    (left,) = traces()  # a failed engine keeps its logs and the reason, and nothing else
    assert {path.name for path in left.iterdir()} == {"server_0.log", "failed.txt"}
