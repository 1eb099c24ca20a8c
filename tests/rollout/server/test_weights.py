"""Weight updates fail, hang or change nothing: no completion of wrong weights is delivered."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from paths import SUPPORT
from served_engines import (
    LORA,
    PLAIN,
    PROMPTS,
    SEEDED,
    assert_same,
    assert_written_by,
    command_of,
    generate,
    hurry,
    launch,
    serving,
    wait_until_ready,
)
from sglang_server import free_port, running_server
from tiny import perturbed, tiny_policy
from worker_processes import wait_until

from lit_grpo.policy import LoRA
from lit_grpo.rollout import EngineFailed
from lit_grpo.rollout.server import guard as server_guard


def test_an_update_that_fails_once_is_retried(server):
    policy = tiny_policy()
    with serving(policy, urls=[server.url]) as engine:
        server.faults(refuse_updates=1)
        engine.load_weights(perturbed(policy), 1)
        assert_written_by({1: policy.model}, PROMPTS, generate(engine, PROMPTS, PLAIN))
        assert engine.observe().totals["rollout/restarts"] == 0


@pytest.mark.parametrize(
    "fault",
    [{"refuse_updates": 2}, pytest.param({"hang_updates": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_server_that_fails_its_update_twice_is_restarted_and_updated(two, fault):
    policy = tiny_policy()
    patient = {"max_restarts": 50}
    with serving(policy, urls=[server.url for server in two], supervision=patient) as engine:
        wait_until_ready(engine)
        two[0].faults(**fault)
        if "hang_updates" in fault:
            hurry(engine, weight_sync_timeout=3.0)
        engine.load_weights(perturbed(policy), 1)
        assert_written_by({1: policy.model}, PROMPTS, generate(engine, PROMPTS, PLAIN))
        wait_until_ready(engine)
        assert [one.get("/model_info")[1]["weight_version"] for one in two] == ["1", "1"]


def test_a_server_that_an_earlier_run_left_paused_is_used(policy, server, undisturbed):
    server.post("/pause_generation", mode="retract")
    with serving(policy, urls=[server.url]) as engine:
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])


@pytest.mark.slow
def test_a_restarted_server_is_checked_and_a_mismatch_fails_the_engine(tmp_path):
    """It starts with the first weights again, and its update only seems to happen."""
    policy, is_stale = tiny_policy(), tmp_path / "stale"
    with serving(policy, launch=launch(program=program_with_stale_updates(is_stale))) as engine:
        engine.load_weights(perturbed(policy), 1)
        assert_written_by({1: policy.model}, PROMPTS, generate(engine, PROMPTS, PLAIN))
        is_stale.touch()
        for guard in psutil.Process().children():
            for server in guard.children() if server_guard.__file__ in command_of(guard) else ():
                server.kill()
        with pytest.raises(EngineFailed, match="differ from the trainer's by"):
            generate(engine, PROMPTS, PLAIN)


def program_with_stale_updates(is_stale: Path):
    """The test server, whose updates are stale if the file exists when it is started."""
    code = f"""
import pathlib, sys
sys.path.insert(0, {str(SUPPORT)!r})
from _sglang_faults import Faults
Faults.__init__.__kwdefaults__["stale_updates"] = 99 * pathlib.Path({str(is_stale)!r}).exists()
import sglang_server
sglang_server.main()
"""
    return [sys.executable, "-c", code]


def test_a_weight_check_without_an_answer_is_repeated_after_a_restart(policy, server, undisturbed):
    patient = {"max_restarts": 50}
    with (
        ThreadPoolExecutor(1) as pool,
        serving(policy, version=-1, urls=[server.url], supervision=patient) as engine,
    ):
        server.faults(hang_generate=10**6)
        hurry(engine, weight_sync_timeout=2.0)
        loading = pool.submit(engine.load_weights, policy, 0)
        wait_until(lambda: server.log()["generating"] > 0)
        so_far = num_recoveries(server)
        wait_until(lambda: num_recoveries(server) > so_far)
        hurry(engine, weight_sync_timeout=30.0)
        server.faults()
        loading.result(60)
        assert engine.observe().totals["rollout/restarts"] >= 1
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])


def num_recoveries(server) -> int:
    """Return how often an engine has connected to a server, or continued it after an update."""
    return server.log()["requests"]["/continue_generation"]


def test_a_server_whose_weights_were_replaced_from_outside_is_updated_again(
    policy, server, directory, undisturbed
):
    with serving(policy, urls=[server.url]) as engine:
        weights = {"model_path": str(directory), "weight_version": "default"}
        assert server.post("/update_weights_from_disk", **weights)[0] == 200
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        wait_until(lambda: server.get("/model_info")[1]["weight_version"] == "0")


def test_completions_with_an_unknown_label_are_never_delivered(policy, server):
    """Every label is checked, not only by the health checks."""
    slow = {"health_interval": 1000.0, "max_restarts": 1}
    with serving(policy, urls=[server.url], supervision=slow) as engine:
        server.faults(weight_version="17")
        with pytest.raises(EngineFailed, match="17"):
            generate(engine, PROMPTS, PLAIN)


@pytest.mark.slow
def test_a_server_that_was_restarted_from_outside_gets_its_adapter_again(directory):
    policy = perturbed(tiny_policy(lora=LoRA(rank=4, target_modules=["q_proj", "v_proj"])))
    port = free_port()
    slow = {"health_interval": 1000.0, "max_restarts": 50}  # the first request detects it
    with (
        running_server(directory, port=port, **SEEDED, **LORA) as first,
        serving(
            policy, urls=[f"http://127.0.0.1:{port}"], weight_sync="adapter", supervision=slow
        ) as engine,
    ):
        first.kill()
        with running_server(directory, port=port, **SEEDED, **LORA):
            completions = generate(engine, PROMPTS, PLAIN)
    assert_written_by({0: policy.model}, PROMPTS, completions)
