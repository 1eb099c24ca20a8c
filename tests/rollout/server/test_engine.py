"""The engine as a whole: its settings, its ranks, and what is left after it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import psutil
import pytest
from paths import SUPPORT
from served_engines import LONG, PROMPTS, generate, launch, launched_servers, serving
from sglang_server import OFFLINE
from small_runs import PROMPTS as TRAINING
from small_runs import make_module, make_trainer
from tiny import perturbed, prompt, tiny_policy
from worker_processes import is_alive, wait_until

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.distributed import ranks as distributed_ranks
from lit_grpo.rollout import EngineFailed, Launch, Sampling, SGLangEngine, VLLMServerEngine
from lit_grpo.rollout.server import directory as engine_directory
from lit_grpo.rollout.server import engine as served_engine

SHORT = Sampling(max_tokens=8)
WITH_WORKER = [sys.executable, str(SUPPORT / "server_with_worker.py")]


@pytest.mark.parametrize("engine", [VLLMServerEngine, SGLangEngine])
def test_servers_are_either_launched_or_attached_to(engine):
    with pytest.raises(ValueError, match=r"launch and urls must not both be set.*init_args"):
        engine(launch=Launch(), urls=["http://10.0.0.2:8000"])


def test_servers_on_other_machines_need_a_directory_that_they_can_read():
    with pytest.raises(ValueError, match=r"init_args\.directory"):
        VLLMServerEngine(urls=["http://127.0.0.1:8000", "http://10.0.0.2:8000"])
    VLLMServerEngine(urls=["http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:8000"])
    VLLMServerEngine(urls=["http://10.0.0.2:8000"], directory="/shared")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("request_timeout", 0), ("request_retries", -1), ("max_concurrency", 0)],
)
def test_limits_of_requests_that_are_out_of_range_are_refused(setting, value):
    with pytest.raises(ValueError, match=rf"got {value}.*Set model\.engine\.init_args\.{setting}"):
        SGLangEngine(**{setting: value})


def test_a_port_that_is_taken_is_refused_and_nothing_is_left(policy, traces):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} .*launch.port to a different port"):
            SGLangEngine(launch=launch(port=port)).start(policy)
        assert traces() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype", "served", "tolerance"),
    [
        ("32-true", None, "float32", 0.005),
        ("bf16-mixed", None, "bfloat16", 0.1),
        ("bf16-mixed", "float32", "float32", 0.005),
    ],
)
def test_a_launched_server_has_the_trainers_precision_or_its_own_and_is_checked_by_it(
    precision, dtype, served, tolerance, tmp_path
):
    engine = SGLangEngine(launch=launch(dtype=dtype), directory=str(tmp_path))
    module = make_module(engine=engine)
    with closing(engine):
        make_trainer(precision=precision).fit(module, PromptLoader(TRAINING, 4))
        assert f"--dtype {served} " in (tmp_path / "server_0.log").read_text()
        assert engine._expected_logprobs(module.policy).tolerance == tolerance


def session_of(server) -> list[int]:
    """Return every process of a server, of all process groups."""
    found = []
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == os.getsid(server.pid):
                found.append(process.pid)
    return found


def wait_for_memory(traces, number=1):
    wait_until(lambda: sum(path.parent.name == "shm" for path in traces()) == number)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    "is_killed",
    [pytest.param(False, marks=pytest.mark.slow, id="running"), pytest.param(True, id="killed")],
)
def test_nothing_is_left_of_launched_servers(policy, traces, is_killed):
    with serving(policy, launch=launch(program=WITH_WORKER)):
        (server,) = launched_servers()
        processes = session_of(server)
        assert len(processes) >= 2
        wait_for_memory(traces)
        if is_killed:
            os.kill(server.pid, signal.SIGKILL)
    assert not any(map(is_alive, processes))
    assert traces() == []
    assert not is_listening(server.port)


@pytest.mark.parametrize("num_processes", [0, 2])
def test_nothing_is_left_of_servers_that_are_still_starting(policy, traces, num_processes):
    engine = SGLangEngine(launch=launch(num_servers=2))
    engine.start(policy)
    wait_until(lambda: len(launched_servers()) >= num_processes)
    engine.close()
    assert traces() == []
    assert not launched_servers()


def test_attached_servers_keep_running_after_the_end(policy, server):
    with serving(policy, urls=[server.url]):
        pass
    assert server.process.poll() is None
    assert server.get("/model_info")[0] == 200


def test_closing_an_engine_ends_the_generation_of_another_thread(policy, server):
    with ThreadPoolExecutor(1) as pool, serving(policy, urls=[server.url]) as engine:
        server.faults(hold_after_tokens=2)
        running = pool.submit(generate, engine, PROMPTS, LONG)
        wait_until(lambda: server.log()["held"] > 0)
        engine.close()
        assert running.exception(60) is not None
        wait_until(lambda: server.log()["generating"] == 0)


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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_trainer_is_killed(traces, number):
    code = TRAINER.format(tests=str(SUPPORT), program=WITH_WORKER)
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | OFFLINE
    )
    try:
        assert trainer.stdout.readline() == b"ready\n"
        wait_until(lambda: len(launched_servers(trainer.pid)) == 2)  # one may be ready before
        servers = launched_servers(trainer.pid)
        wait_for_memory(traces, 2)
        processes = [pid for server in servers for pid in session_of(server)]
        assert len(processes) >= 4
        trainer.send_signal(number)
        wait_until(lambda: not any(map(is_alive, processes)))
        wait_until(lambda: traces() == [])
        assert not any(is_listening(server.port) for server in servers)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


class ThreadRanks:
    """Ranks of a run as threads of this process."""

    def __init__(self, number: int) -> None:
        self._values: list = [None] * number
        self._barrier = threading.Barrier(number, timeout=200)
        self._local = threading.local()

    def get_rank(self) -> int:
        return self._local.rank

    def gather_objects(self, value) -> list:
        self._values[self.get_rank()] = value
        self._barrier.wait()
        gathered = list(self._values)
        self._barrier.wait()
        return gathered

    def run(self, function) -> list:
        """Call the function with the number of each rank; return the results."""

        def run_rank(rank):
            self._local.rank = rank
            return function(rank)

        numbers = range(len(self._values))
        with ThreadPoolExecutor(len(numbers)) as pool:
            return list(pool.map(run_rank, numbers))


@pytest.fixture
def two_ranks(monkeypatch):
    ranks = ThreadRanks(2)
    monkeypatch.setattr(served_engine, "get_rank", ranks.get_rank)
    for module in (distributed_ranks, served_engine, engine_directory):
        monkeypatch.setattr(module, "gather_objects", ranks.gather_objects)
    return ranks


def versions(completions) -> set[int]:
    return {version for one in completions for version in one.policy_versions}


def test_rank_zero_launches_and_updates_the_servers_that_all_ranks_use(two_ranks, traces):
    policies, new_policies = ([tiny_policy() for _ in range(2)] for _ in range(2))
    for policy in new_policies:
        perturbed(policy)

    def run(rank):
        mine = [prompt("1+1=" + "ab"[rank], id=str(rank))]
        with serving(policies[rank], launch=launch()) as engine:
            old = generate(engine, mine, SHORT)
            engine.load_weights(new_policies[rank], 1)
            new = generate(engine, mine, SHORT)
            two_ranks.gather_objects(None)  # rank 0 closes the server
            return old, new

    for old, new in (found := two_ranks.run(run)):
        assert versions(old) == {0}
        assert versions(new) == {1}
    first, second = ([one.token_ids for one in new] for _, new in found)
    assert first != second
    assert traces() == []


def generate_until_failure(engine) -> str:
    try:
        while True:
            generate(engine, PROMPTS[:1], SHORT)
    except EngineFailed as error:
        return str(error)


@pytest.mark.slow
def test_a_failure_of_rank_zero_reaches_the_other_rank(two_ranks):
    """Which would otherwise try to reconnect for much longer."""
    policies = [tiny_policy() for _ in range(2)]

    def run(rank):
        with serving(
            policies[rank], launch=launch(), supervision={"max_restarts": 50 * rank}
        ) as engine:
            two_ranks.gather_objects(None)
            if rank == 0:
                launched_servers()[0].kill()
            failure = generate_until_failure(engine)
            two_ranks.gather_objects(None)
            return failure

    first, second = two_ranks.run(run)
    assert "was restarted 0 times in a row" in first
    assert second == first


RANK = """
import json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from served_engines import generate, launch, launched_servers, serving
from tiny import perturbed, prompt, tiny_policy
from lit_grpo.rollout import EngineFailed, Sampling
rank, sampling = int(sys.argv[1]), Sampling(max_tokens=8)
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2,
                        timeout=timedelta(seconds=150))
policy = tiny_policy()
mine = [prompt("1+1=" + "ab"[rank], id=str(rank))]
found = {{}}
with serving(policy, launch=launch(), supervision={{"max_restarts": 50 * rank}}) as engine:
    found["first"] = [one.policy_versions for one in generate(engine, mine, sampling)]
    engine.load_weights(perturbed(policy), 1)
    found["second"] = [one.policy_versions for one in generate(engine, mine, sampling)]
    dist.barrier()
    if rank == 0:
        launched_servers()[0].kill()
    try:
        while True:
            generate(engine, mine, sampling)
    except EngineFailed as error:
        found["failure"] = str(error)
json.dump(found, open("{out}" + str(rank), "w"))
"""


@pytest.mark.slow
def test_two_processes_share_a_server_and_its_failure(tmp_path, importer):
    code = RANK.format(store=tmp_path / "store", out=tmp_path / "rank")
    (tmp_path / "rank.py").write_text(code)
    ranks = [
        importer.start(
            ["1", "rank.py", str(rank)],
            tmp_path,
            tmp_path / f"said{rank}.txt",
            program="forked_program",
            **OFFLINE,
        )
        for rank in (0, 1)
    ]
    try:
        for rank, process in enumerate(ranks):
            assert process.wait(240) == 0, (tmp_path / f"said{rank}.txt").read_text()
    finally:
        for process in ranks:
            process.kill()
    found = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    for rank in found:
        assert {version for row in rank["first"] for version in row} == {0}
        assert {version for row in rank["second"] for version in row} == {1}
    assert "was restarted 0 times in a row" in found[0]["failure"]
    assert found[1]["failure"] == found[0]["failure"]
