"""Servers die, hang, lie and lose connections: no rollout is lost, doubled or misattributed, and
nothing is left behind. Real processes, real kills, real HTTP, a real tiny model."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from gate import Gate
from paths import SUPPORT
from served_engines import (
    LORA,
    PLAIN,
    PROMPTS,
    assert_written_by,
    generate,
    launch,
    launched_servers,
    serving,
    stirred,
)
from sglang_server import OFFLINE, free_port, running_server
from tiny import prompt, tiny_policy
from worker_processes import is_alive, wait_until

from lit_grpo.policy import LoRA
from lit_grpo.rollout import EngineFailed, Sampling, SGLangEngine
from lit_grpo.rollout.server import guard as server_guard
from lit_grpo.rollout.server.process import ServerProcess

LONG = Sampling(max_tokens=60)
WITH_WORKER = [sys.executable, str(SUPPORT / "server_with_worker.py")]
SEEDED = {"enable_deterministic_inference": True, "incremental_streaming_output": True}


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def directory(policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    policy.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def shared(directory):
    with running_server(directory, **SEEDED, **LORA) as server:
        yield server


@pytest.fixture(scope="module")
def shared_too(directory):
    with running_server(directory, **SEEDED, **LORA) as server:
        yield server


@pytest.fixture(autouse=True)
def traces(tmp_path, monkeypatch):
    """What engines have in the temporary directory and in shared memory."""
    name = f"lit-grpo-test-{uuid4().hex}"
    monkeypatch.setenv("NAME_OF_MEMORY", name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return lambda: [*tmp_path.glob("lit-grpo-*"), *Path("/dev/shm").glob(f"*{name}*")]


def reset(server, directory):
    server.faults()
    server.post("/abort_request", abort_all=True)
    server.post("/continue_generation")
    weights = {"model_path": str(directory), "weight_version": "default"}
    assert server.post("/update_weights_from_disk", **weights)[0] == 200


@pytest.fixture
def server(shared, directory):
    """Sound and with its first weights before the test."""
    reset(shared, directory)
    return shared


@pytest.fixture
def two(server, shared_too, directory):
    reset(shared_too, directory)
    return [server, shared_too]


@pytest.fixture(scope="module")
def undisturbed(policy, shared, directory):
    """The completions of `PROMPTS` that nothing comes in the way of."""
    reset(shared, directory)
    with serving(policy, urls=[shared.url]) as engine:
        return {
            sampling: generate(engine, PROMPTS, sampling, group_size=4)
            for sampling in (PLAIN, LONG)
        }


def assert_same(completions, expected):
    for one, other in zip(completions, expected, strict=True):
        assert one.token_ids == other.token_ids, one.failure
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-4)
        assert one.policy_versions == other.policy_versions


@contextmanager
def in_the_middle(engine, servers, sampling=LONG, delay=0.05):
    """A generation that has begun; the body gets the future of its completions."""
    for server in servers:
        server.faults(token_delay_seconds=delay)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine, PROMPTS, sampling)
        wait_until(lambda: sum(server.log()["generating"] for server in servers) == 12)
        time.sleep(3 * delay)
        yield running


# Servers that end or hang


def test_a_server_killed_in_mid_generation_is_restarted_and_every_row_delivered(
    policy, undisturbed
):
    with serving(policy, launch=launch()) as engine:
        (server,) = launched_servers()
        with in_the_middle(engine, [server]) as running:
            os.kill(server.pid, signal.SIGKILL)
            completions = running.result(120)
        assert_same(completions, undisturbed[LONG])
        observed = engine.observe()
        assert observed.totals["rollout/restarts"] == 1
        assert observed.totals["rollout/retries"] >= 12
        assert len(observed.means["sampler/proof_difference"]) == 2  # proven again
        assert [other.pid for other in launched_servers()] != [server.pid]


def test_a_stopped_server_is_killed_and_restarted(policy, undisturbed):
    quick = {"health_timeout": 2.0}
    with serving(policy, launch=launch(), supervision=quick) as engine:
        (server,) = launched_servers()
        with in_the_middle(engine, [server]) as running:
            os.kill(server.pid, signal.SIGSTOP)
            completions = running.result(120)
        assert_same(completions, undisturbed[LONG])
        assert not is_alive(server.pid)


def test_a_server_that_says_it_is_well_and_never_answers_is_restarted(policy, undisturbed):
    quick = {"health_timeout": 2.0, "silence_timeout": 1.0}
    with serving(policy, launch=launch(), supervision=quick) as engine:
        (server,) = launched_servers()
        server.faults(hang_generate=1000)
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        assert engine.observe().totals["rollout/restarts"] == 1
        assert not is_alive(server.pid)


def test_a_request_that_is_never_answered_is_made_again(policy, server, undisturbed):
    with serving(policy, urls=[server.url], request_timeout=1.0) as engine:
        server.faults(hang_generate=3)
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        assert engine.observe().totals["rollout/restarts"] == 0


def test_the_other_server_takes_over_the_requests_of_a_killed_one(policy, undisturbed):
    with serving(policy, launch=launch(num_servers=2)) as engine:
        wait_until(lambda: engine.observe().means["rollout/ready_fraction"] == [1.0, 1.0])
        servers = launched_servers()
        with in_the_middle(engine, servers) as running:
            assert [server.log()["generating"] for server in servers] == [6, 6]
            servers[0].kill()
            completions = running.result(120)
        assert_same(completions, undisturbed[LONG])


def test_a_killed_server_is_not_held_against_the_requests(policy, server, directory, undisturbed):
    """Not even where no retries are allowed."""
    with (
        running_server(directory, **SEEDED) as other,
        serving(policy, urls=[server.url, other.url], request_retries=0) as engine,
    ):
        wait_until(lambda: engine.observe().means["rollout/ready_fraction"] == [1.0, 1.0])
        with in_the_middle(engine, [server, other]) as running:
            other.kill()
            server.faults()
            completions = running.result(60)
        assert_same(completions, undisturbed[LONG])


# Servers that do not come up


def test_a_run_whose_only_server_is_given_up_ends_whatever_is_under_way(policy, directory):
    """Also what was at its last attempt, and waited to hear whose fault that was."""
    settings = {"request_retries": 0, "supervision": {"max_restarts": 0}}
    with (
        running_server(directory, **SEEDED) as other,
        serving(policy, urls=[other.url], **settings) as engine,
        in_the_middle(engine, [other]) as running,
    ):
        other.kill()
        with pytest.raises(EngineFailed, match="was looked for again 0 times in a row"):
            running.result(60)


def test_a_port_that_is_taken_is_said_at_once(policy, traces):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} .*launch.port to another one"):
            SGLangEngine(launch=launch(port=port)).start(policy)
        assert traces() == []


def failure_of(policy, **settings) -> str:
    """With which an engine ends instead of its first update."""
    with pytest.raises(EngineFailed) as failure, serving(policy, **settings):
        pass
    return str(failure.value)


def test_a_server_that_is_never_well_ends_the_run_with_the_end_of_its_log(policy):
    ill = launch(flags={"never-healthy": True})
    quick = {"startup_timeout": 20.0, "max_restarts": 0}
    why = failure_of(policy, launch=ill, supervision=quick)
    assert "did not answer within 20 s (GET /health: 503" in why
    assert "The end of its log:\n" in why
    assert why.count("\n") <= 17
    assert not launched_servers()


def test_a_server_that_cannot_start_ends_the_run_with_what_it_said(policy):
    broken = launch(flags={"no-such-flag": 1})
    why = failure_of(policy, launch=broken, supervision={"max_restarts": 1})
    assert "was restarted 1 times in a row" in why
    assert "unrecognized arguments: --no-such-flag" in why


def test_a_program_that_is_not_there_ends_the_run_with_the_key_to_set(policy, traces):
    absent = launch(program=["no-such-program"])
    why = failure_of(policy, launch=absent, supervision={"max_restarts": 0})
    assert "'no-such-program' could not be started" in why
    assert "launch.python or .program" in why
    (left,) = traces()  # a failed engine leaves its logs and the reason, and no more
    assert {path.name for path in left.iterdir()} == {"server_0.log", "failed.txt"}


def test_an_address_of_something_else_ends_the_run(policy, tmp_path):
    """It says with status 200 that it is well, and knows no weights."""
    for name in ("health", "model_info", "abort_request", "continue_generation"):
        (tmp_path / name).write_text("well")
    code = (
        "import http.server as h; H = h.SimpleHTTPRequestHandler; H.do_POST = H.do_GET;"
        f"h.ThreadingHTTPServer(('127.0.0.1', {(port := free_port())}), H).serve_forever()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        quick = {"max_restarts": 1, "startup_timeout": 20.0}
        why = failure_of(policy, urls=[f"http://127.0.0.1:{port}"], supervision=quick)
        assert "is not well" in why
    finally:
        other.kill()
        other.wait()


def test_nobody_at_the_address_ends_the_run(policy):
    quick = {"max_restarts": 1, "startup_timeout": 1.0}
    why = failure_of(policy, urls=[f"http://127.0.0.1:{free_port()}"], supervision=quick)
    assert "did not answer within 1 s" in why


# Requests that fail


def test_a_refused_request_is_absent_and_not_made_again(policy, server):
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


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_failing_request_is_made_again(policy, server, undisturbed, status):
    with serving(policy, urls=[server.url]) as engine:
        server.faults(generate_statuses=[status] * 2)
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        assert engine.observe().totals["rollout/retries"] == 2


def test_a_request_that_fails_too_often_is_absent(policy, server):
    with serving(policy, urls=[server.url], request_retries=1) as engine:
        server.faults(generate_statuses=[500, 500])
        (completion,) = generate(engine, PROMPTS[:1], PLAIN, group_size=1)
    assert completion.is_failed
    assert "2 attempts: POST /generate: 500" in completion.failure


def test_what_a_broken_stream_left_unfinished_comes_out_as_it_would_have(
    policy, server, undisturbed
):
    with serving(policy, urls=[server.url]) as engine:
        before = server.log()["requests"]["/generate"]
        server.faults(cut_generate=5)
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        assert server.log()["requests"]["/generate"] == before + 12 + 5


def test_a_server_that_says_nothing_within_request_timeout_is_asked_again(policy, server):
    with serving(policy, urls=[server.url], request_timeout=0.5, request_retries=1) as engine:
        server.faults(hang_generate=2)
        (completion,) = generate(engine, PROMPTS[:1], PLAIN, group_size=1)
    assert completion.is_failed
    assert "no answer in time" in completion.failure


# Load


def test_no_more_completions_than_max_concurrency_run_at_once(policy, directory):
    with (
        running_server(directory, **SEEDED) as fresh,
        serving(policy, urls=[fresh.url], max_concurrency=3) as engine,
    ):
        before = fresh.log()["requests"]["/generate"]
        fresh.count_anew()  # a proof's do not wait for each other
        fresh.faults(token_delay_seconds=0.01)
        generate(engine, PROMPTS, PLAIN, group_size=8)
        after = fresh.log()
        assert after["requests"]["/generate"] == before + 24
        assert after["most_unfinished"] == 3


def test_two_servers_share_the_load(policy, two):
    with serving(policy, urls=[server.url for server in two]) as engine:
        wait_until(lambda: engine.observe().means["rollout/ready_fraction"] == [1.0, 1.0])
        before = [server.log()["requests"]["/generate"] for server in two]
        for server in two:
            server.faults(token_delay_seconds=0.02)
        generate(engine, PROMPTS, PLAIN, group_size=8)
        after = [server.log()["requests"]["/generate"] for server in two]
    shares = [now - then for now, then in zip(after, before, strict=True)]
    assert sum(shares) == 24
    assert min(shares) >= 8


# Weights that do not arrive


def test_an_update_that_fails_once_is_made_again(server):
    policy = tiny_policy()
    with serving(policy, urls=[server.url]) as engine:
        server.faults(refuse_updates=1)
        engine.load_weights(stirred(policy), 1)
        assert_written_by({1: policy.model}, PROMPTS, generate(engine, PROMPTS, PLAIN))
        assert engine.observe().totals["rollout/restarts"] == 0


def num_updates(server) -> int:
    return server.log()["requests"].get("/update_weights_from_disk", 0)


def test_a_server_that_dies_in_its_update_is_not_waited_for_until_that_takes_too_long(two):
    """It listens no more; the update itself gets neither an answer nor an error."""
    policy, gate = tiny_policy(), Gate(two[0].port)
    patient = {"weight_sync_timeout": 600.0}
    with serving(policy, urls=[gate.url, two[1].url], supervision=patient) as engine:
        wait_until(lambda: engine.observe().means["rollout/ready_fraction"] == [1.0, 1.0])
        so_far = num_updates(two[0])
        two[0].faults(hang_updates=1)
        with ThreadPoolExecutor(1) as pool:
            updating = pool.submit(engine.load_weights, stirred(policy), 1)
            wait_until(lambda: num_updates(two[0]) > so_far)
            gate.shut()
            updating.result(60)
        assert_written_by({1: policy.model}, PROMPTS, generate(engine, PROMPTS, PLAIN))
        gate.open()
        wait_until(lambda: engine.observe().means["rollout/ready_fraction"] == [1.0, 1.0])
        assert [one.get("/model_info")[1]["weight_version"] for one in two] == ["1", "1"]


@pytest.mark.parametrize("fault", [{"refuse_updates": 2}, {"hang_updates": 2}], ids=str)
def test_a_server_that_fails_its_update_twice_is_taken_out_and_comes_back(two, fault):
    policy = tiny_policy()
    quick = {"weight_sync_timeout": 1.5}
    with serving(policy, urls=[server.url for server in two], supervision=quick) as engine:
        wait_until(lambda: engine.observe().means["rollout/ready_fraction"] == [1.0, 1.0])
        two[0].faults(**fault)
        engine.load_weights(stirred(policy), 1)
        assert_written_by({1: policy.model}, PROMPTS, generate(engine, PROMPTS, PLAIN))
        wait_until(lambda: engine.observe().means["rollout/ready_fraction"] == [1.0, 1.0])
        assert [one.get("/model_info")[1]["weight_version"] for one in two] == ["1", "1"]


def test_a_server_that_a_dead_run_left_paused_is_taken_up(policy, server, undisturbed):
    server.post("/pause_generation", mode="retract")
    with serving(policy, urls=[server.url]) as engine:
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])


def test_a_restarted_server_that_cannot_be_proven_ends_the_run(tmp_path):
    """It begins with the first weights again, and its update only seems to happen."""
    policy, is_lying = tiny_policy(), tmp_path / "lying"
    with serving(policy, launch=launch(program=program_that_lies(is_lying))) as engine:
        engine.load_weights(stirred(policy), 1)
        assert_written_by({1: policy.model}, PROMPTS, generate(engine, PROMPTS, PLAIN))
        is_lying.touch()
        for guard in psutil.Process().children():
            for server in guard.children() if server_guard.__file__ in guard.cmdline() else ():
                server.kill()
        with pytest.raises(EngineFailed, match="differ from the trainer's by"):
            generate(engine, PROMPTS, PLAIN)


def program_that_lies(is_lying: Path):
    """The server, whose updates are stale if the file is there at its start."""
    code = f"""
import pathlib, sys
sys.path.insert(0, {str(SUPPORT)!r})
from _sglang_faults import Faults
Faults.__init__.__kwdefaults__["stale_updates"] = 99 * pathlib.Path({str(is_lying)!r}).exists()
import sglang_server
sglang_server.main()
"""
    return [sys.executable, "-c", code]


def test_a_proof_that_is_never_answered_is_made_again(policy, server, undisturbed):
    quick = {"weight_sync_timeout": 2.0}
    with serving(policy, version=-1, urls=[server.url], supervision=quick) as engine:
        server.faults(hang_generate=64)
        engine.load_weights(policy, 0)
        assert engine.observe().totals["rollout/restarts"] == 1
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])


def test_a_server_with_other_weights_than_it_should_have_is_taken_out_and_updated(
    policy, server, directory, undisturbed
):
    with serving(policy, urls=[server.url]) as engine:
        weights = {"model_path": str(directory), "weight_version": "default"}
        assert server.post("/update_weights_from_disk", **weights)[0] == 200
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        wait_until(lambda: server.get("/model_info")[1]["weight_version"] == "0")


def test_completions_of_other_weights_are_never_delivered(policy, server):
    """Between two looks at the server, every label is checked."""
    slow = {"health_interval": 1000.0, "max_restarts": 1}
    with serving(policy, urls=[server.url], supervision=slow) as engine:
        server.faults(weight_version="17")
        with pytest.raises(EngineFailed, match="17"):
            generate(engine, PROMPTS, PLAIN)


def test_a_server_restarted_behind_our_back_gets_its_weights_again(policy, directory, undisturbed):
    port = free_port()
    with running_server(directory, port=port, **SEEDED) as first:
        engine_of = serving(policy, urls=[f"http://127.0.0.1:{port}"], supervision=PATIENT)
        with engine_of as engine:
            first.kill()
            with running_server(directory, port=port, **SEEDED):
                assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])


PATIENT = {"max_restarts": 50}


def test_a_server_restarted_behind_our_back_gets_its_adapter_again(directory):
    policy = stirred(tiny_policy(lora=LoRA(rank=4, target_modules=["q_proj", "v_proj"])))
    port = free_port()
    slow = {"health_interval": 1000.0, "max_restarts": 50}  # the first request finds it out
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


# Nothing is left behind


def wait_for_memory(traces, number=1):
    wait_until(lambda: sum(path.parent.name == "shm" for path in traces()) == number)
    time.sleep(1.5)  # the guard has seen it


def session_of(server) -> list[int]:
    """Every process of a server, in whatever group."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == os.getsid(server.pid):
                found.append(process.pid)
    return found


@pytest.mark.parametrize("ending", ["close", "exception", "killed server"])
def test_nothing_is_left_of_launched_servers(policy, traces, ending):
    with suppress(ZeroDivisionError), serving(policy, launch=launch(program=WITH_WORKER)):
        (server,) = launched_servers()
        processes = session_of(server)
        assert len(processes) >= 2
        wait_for_memory(traces)
        if ending == "killed server":
            os.kill(server.pid, signal.SIGKILL)
        if ending == "exception":
            raise ZeroDivisionError
    assert not any(map(is_alive, processes))
    assert traces() == []
    assert not is_listening(server.port)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_closing_an_engine_whose_servers_are_only_starting_leaves_nothing(policy, traces):
    for pause in (0.0, 0.3):
        engine = SGLangEngine(launch=launch(num_servers=2))
        engine.start(policy)
        time.sleep(pause)
        engine.close()
        assert traces() == []
        assert not launched_servers()


TRAINER = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from served_engines import launch, serving
from tiny import tiny_policy
with serving(tiny_policy(), launch=launch(program={program!r}, num_servers=2)):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_trainer_is_killed(traces, number):
    code = TRAINER.format(tests=str(SUPPORT), program=WITH_WORKER)
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | OFFLINE
    )
    try:
        assert trainer.stdout.readline() == b"ready\n"
        servers = launched_servers(trainer.pid)
        processes = [pid for server in servers for pid in session_of(server)]
        assert len(processes) >= 4
        wait_for_memory(traces, 2)
        trainer.send_signal(number)
        wait_until(lambda: not any(map(is_alive, processes)), 30)
        wait_until(lambda: traces() == [], 10)
        assert not any(is_listening(server.port) for server in servers)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def test_attached_servers_go_on_after_the_end(policy, server):
    with serving(policy, urls=[server.url]):
        pass
    assert server.process.poll() is None
    assert server.get("/model_info")[0] == 200


def test_a_forked_process_that_holds_the_pipe_does_not_keep_a_server_up(tmp_path):
    server = ServerProcess(["sleep", "600"], {}, tmp_path / "log")
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        began = time.monotonic()
        server.end()
        assert time.monotonic() - began < 10
        assert not is_alive(server.pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


MAPS = """
import mmap, sys, time
files = [open(path, "rb") for path in sys.argv[2:]]
maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def test_files_in_folders_of_shared_memory_and_those_of_others_stay(tmp_path):
    """A model may be read from there, and what was there before is somebody else's."""
    folder = Path(tempfile.mkdtemp(prefix="lit-grpo-test-", dir="/dev/shm"))
    files = [folder / "model.safetensors", Path(f"{folder}-theirs")]
    try:
        for file in files:
            file.write_bytes(b"weights")
        ready = tmp_path / "ready"
        command = [sys.executable, "-c", MAPS, str(ready), *map(str, files)]
        server = ServerProcess(command, {}, tmp_path / "log")
        wait_until(ready.exists)
        server.end()
        assert [file.read_bytes() for file in files] == [b"weights", b"weights"]
    finally:
        files[1].unlink(missing_ok=True)
        shutil.rmtree(folder)


def test_the_end_of_a_log_begins_with_the_errors_that_are_no_longer_at_its_end(tmp_path):
    said = ["RuntimeError: the cause", "RuntimeError: the cause", "EngineDeadError: see above"]
    said += [f"leaked {number}" for number in range(30)]
    server = ServerProcess(["printf", "%s\\n", *said], {}, tmp_path / "log")
    wait_until(lambda: not server.is_running)
    server.end()
    last = [f"leaked {number}" for number in range(27, 30)]
    assert server.log_tail(3).split("\n") == [said[0], said[2], "...", *last]


# Closing while it runs


def test_an_engine_that_is_closed_ends_the_generation_of_another_thread(policy, server):
    with ThreadPoolExecutor(1) as pool, serving(policy, urls=[server.url]) as engine:
        server.faults(token_delay_seconds=0.2)
        running = pool.submit(generate, engine, PROMPTS, LONG)
        wait_until(lambda: server.log()["generating"] > 0)
        engine.close()
        assert running.exception(20) is not None
        wait_until(lambda: server.log()["generating"] == 0)


# Ranks

RANK = """
import json, sys
from datetime import timedelta
sys.path.insert(0, {tests!r})
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from served_engines import generate, launch, launched_servers, serving, stirred
from tiny import prompt, tiny_policy
from lit_grpo.rollout import EngineFailed, Sampling
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=90))
policy = tiny_policy()
mine = [prompt("1+1=" + "ab"[rank], id=str(rank))]
found = {{}}
with serving(policy, launch=launch(), supervision={{"max_restarts": 50 * rank}}) as engine:
    found["first"] = [c.policy_versions for c in generate(engine, mine, Sampling(max_tokens=8))]
    stirred(policy)
    engine.load_weights(policy, 1)
    completions = generate(engine, mine, Sampling(max_tokens=8))
    found["second"] = [c.policy_versions for c in completions]
    found["tokens"] = [c.token_ids for c in completions]
    {then}
json.dump(found, open("{out}" + str(rank), "w"))
"""

FAIL = """
    dist.barrier()
    if rank == 0:
        launched_servers()[0].kill()
    try:
        while True:
            generate(engine, mine, Sampling(max_tokens=8))
    except EngineFailed as error:
        found["failure"] = str(error)
"""


def run_two_ranks(tmp_path, then):
    script = RANK.format(
        tests=str(SUPPORT), store=tmp_path / "store", out=tmp_path / "rank", then=then.strip()
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank)], env=os.environ | OFFLINE,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=150)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]


def test_two_ranks_share_the_servers_that_the_first_one_runs(tmp_path, traces):
    found = run_two_ranks(tmp_path, "pass")
    for rank in found:
        assert {version for row in rank["first"] for version in row} == {0}
        assert {version for row in rank["second"] for version in row} == {1}
        assert len(rank["tokens"]) == 4
    assert found[0]["tokens"] != found[1]["tokens"]
    assert traces() == []


def test_a_failure_of_the_first_ranks_engine_reaches_the_other(tmp_path):
    """Which would go on asking for much longer."""
    first, second = run_two_ranks(tmp_path, FAIL)
    assert "was restarted 0 times in a row" in first["failure"]
    assert second["failure"] == first["failure"]
