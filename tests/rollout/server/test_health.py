"""Servers hang, stop or disappear: health checks find out, and the supervisor restarts them."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from gate import Gate
from served_engines import (
    LONG,
    PLAIN,
    PROMPTS,
    assert_same,
    assert_written_by,
    generate,
    generating,
    hurry,
    launch,
    launched_servers,
    serving,
    wait_until_ready,
)
from tiny import perturbed, tiny_policy
from worker_processes import is_alive, wait_until

from lit_grpo.rollout.server import process as server_process


@pytest.mark.slow
def test_a_suspended_server_is_killed_and_restarted(policy, undisturbed, monkeypatch):
    monkeypatch.setattr(server_process, "GRACE_SECONDS", 0.3)
    strict = {"unhealthy_after": 1, "max_restarts": 20}
    with serving(policy, launch=launch(), supervision=strict) as engine:
        (server,) = launched_servers()
        with generating(engine, [server]) as running:
            os.kill(server.pid, signal.SIGSTOP)
            hurry(engine, health_timeout=1.0)
            completions = running.result(120)
        assert_same(completions, undisturbed[LONG])
        assert not is_alive(server.pid)


@pytest.mark.slow
def test_a_server_that_reports_to_be_healthy_and_hangs_is_restarted(policy, undisturbed):
    with serving(policy, launch=launch(), supervision={"max_restarts": 20}) as engine:
        (server,) = launched_servers()
        server.faults(hang_generate=1000)
        hurry(engine, health_timeout=1.0, silence_timeout=0.5)
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        assert engine.observe().totals["rollout/restarts"] >= 1
        assert not is_alive(server.pid)


def num_updates(server) -> int:
    return server.log()["requests"].get("/update_weights_from_disk", 0)


def test_a_server_that_dies_during_an_update_is_noticed_before_the_update_times_out(two):
    """Nothing listens at its address any more, and the update is neither answered nor refused."""
    policy, gate = tiny_policy(), Gate(two[0].port)
    patient = {"weight_sync_timeout": 600.0}
    with serving(policy, urls=[gate.url, two[1].url], supervision=patient) as engine:
        wait_until_ready(engine)
        so_far = num_updates(two[0])
        two[0].faults(hang_updates=1)
        with ThreadPoolExecutor(1) as pool:
            updating = pool.submit(engine.load_weights, perturbed(policy), 1)
            wait_until(lambda: num_updates(two[0]) > so_far)
            gate.shut()
            updating.result(60)
        assert_written_by({1: policy.model}, PROMPTS, generate(engine, PROMPTS, PLAIN))
        gate.open()
        wait_until_ready(engine)
        assert [one.get("/model_info")[1]["weight_version"] for one in two] == ["1", "1"]
