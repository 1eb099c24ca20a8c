"""What servers are started with, what is refused before, and who is warned of their addresses."""

import json
import logging
import socket
import sys
from dataclasses import replace

import pytest
from served_engines import serving
from tiny import tiny_policy
from worker_processes import wait_until

from lit_grpo.rollout import (
    EngineFailed,
    Launch,
    Proof,
    SGLangEngine,
    Supervision,
    VLLMServerEngine,
)
from lit_grpo.rollout.server.api import Model
from lit_grpo.rollout.server.launching import choose_ports, server_starts, warn_of_public_address
from lit_grpo.rollout.vllm.nccl_transfer import NCCLTransfer
from lit_grpo.rollout.vllm.server import VLLMAPI

PLAIN_MODEL = Model(
    path="/models/small", tokenizer="/tokenizers/mine", dtype="bfloat16", adapter_rank=None
)

# Addresses

PRIVATE = ["127.0.0.1", "127.8.8.8", "[::1]", "localhost", "10.0.0.2", "172.16.0.1"]
PRIVATE += ["172.31.255.254", "192.168.1.1", "[fd00::1]", "[fe80::1]", "[::ffff:10.0.0.2]"]
PUBLIC = ["0.0.0.0", "[::]", "8.8.8.8", "172.32.0.1", "[2a00:1450::1]", "[::ffff:8.8.8.8]"]


def warnings_of(host, caplog) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        warn_of_public_address(f"http://{host}:8000")
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("host", PRIVATE)
def test_a_loopback_or_private_address_is_fine(host, caplog):
    assert warnings_of(host, caplog) == []


@pytest.mark.parametrize("host", PUBLIC)
def test_any_other_address_is_warned_of(host, caplog):
    (warning,) = warnings_of(host, caplog)
    assert warning.startswith(f"http://{host}:8000 is no loopback or private address")
    assert "have the server execute code" in warning


@pytest.fixture
def names(monkeypatch):
    """Gives host names their addresses; those without are not known."""
    known = {}

    def look_up(host, port):
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.mark.parametrize(
    ("addresses", "num_warnings"),
    [(["10.0.0.2"], 0), (["8.8.8.8"], 1), (["10.0.0.2", "8.8.8.8"], 1)],
    ids=["private", "public", "both"],
)
def test_a_host_name_is_as_public_as_its_addresses(addresses, num_warnings, names, caplog):
    names["node-7"] = addresses
    assert len(warnings_of("node-7", caplog)) == num_warnings


def test_a_host_name_without_an_address_is_left_to_those_who_use_it(names, caplog):
    assert warnings_of("nowhere", caplog) == []


def test_a_server_is_found_at_an_ipv6_address(tmp_path):
    """Its own command has the bare address, the url has it in brackets."""
    absent = Launch(program=["no-such-program"], host="::1")
    quick = {"max_restarts": 0}
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    settings = {"launch": absent, "supervision": quick, "directory": str(tmp_path)}
    with (
        pytest.raises(EngineFailed, match=r"server at http://\[::1\]:\d+ was restarted 0 times"),
        serving(tiny_policy(), **settings),
    ):
        pass
    assert " --host ::1 " in (tmp_path / "server_0.log").read_text()


# Settings


@pytest.mark.parametrize("engine", [VLLMServerEngine, SGLangEngine])
def test_servers_are_either_launched_or_attached_to(engine):
    with pytest.raises(ValueError, match=r"launch and urls exclude each other.*init_args"):
        engine(launch=Launch(), urls=["http://10.0.0.2:8000"])


@pytest.mark.parametrize(
    "url", ["10.0.0.2:8000", "10.0.0.2", "http://", "http://[::1", "http://a:b", "ftp://a"]
)
def test_what_is_no_address_of_a_server_is_refused(url):
    with pytest.raises(ValueError, match=r"such as 'http://.*model\.engine\.init_args\.urls"):
        VLLMServerEngine(urls=[url], directory="/shared")


def test_servers_on_other_machines_need_a_directory_that_they_see():
    with pytest.raises(ValueError, match=r"init_args\.directory"):
        VLLMServerEngine(urls=["http://127.0.0.1:8000", "http://10.0.0.2:8000"])
    VLLMServerEngine(urls=["http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:8000"])
    VLLMServerEngine(urls=["http://10.0.0.2:8000"], directory="/shared")


@pytest.mark.parametrize("host", ["8.8.8.8", "no-such-host.invalid", "[::1]"])
def test_servers_cannot_listen_for_another_machine(host):
    with pytest.raises(ValueError, match=r"Set model\.engine\.init_args\.launch\.host"):
        choose_ports(Launch(host=host))


def test_a_server_is_not_started_where_somebody_has_come_to_listen(tmp_path):
    """He would get its requests and weights."""
    api = VLLMAPI("processed_logprobs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (start,) = server_starts(api, Launch(port=port), PLAIN_MODEL, [port], tmp_path)
        with pytest.raises(OSError, match="in use"):
            start()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_servers", 0),
        ("tensor_parallel_size", 0),
        ("data_parallel_size", -1),
        ("port", 0),
        ("devices", ["0"]),
        ("devices", ["0", "1", "2"]),
        ("devices", []),
    ],
)
def test_a_launch_that_cannot_be_is_refused_by_the_name_of_its_setting(setting, value):
    with pytest.raises(ValueError, match=rf"launch\.{setting} must"):
        Launch(**{"num_servers": 2, setting: value})


@pytest.mark.parametrize(
    "setting",
    [
        "startup_timeout",
        "health_interval",
        "health_timeout",
        "unhealthy_after",
        "silence_timeout",
        "weight_sync_timeout",
        "first_backoff",
        "max_backoff",
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_every_setting_of_the_watch_must_be_positive(setting, value):
    with pytest.raises(ValueError, match=rf"Set model\.engine\.init_args\.supervision\.{setting}"):
        Supervision(**{setting: value})


def test_no_restarts_may_be_wanted_but_not_fewer():
    assert Supervision(max_restarts=0).max_restarts == 0
    with pytest.raises(ValueError, match=r"Set model\.engine\.init_args\.supervision\.max_restart"):
        Supervision(max_restarts=-1)


@pytest.mark.parametrize("setting", ["every", "num_sequences", "tolerance"])
def test_a_proof_that_proves_nothing_is_refused(setting):
    with pytest.raises(ValueError, match=rf"Set model\.engine\.init_args\.proof\.{setting}"):
        Proof(**{setting: 0})


def test_proofs_come_close_together_at_first_and_then_every_so_often():
    due = [number for number in range(151) if Proof().is_due(number)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 50, 100, 150]
    assert [number for number in range(9) if Proof(every=3).is_due(number)] == [0, 1, 2, 3, 6]
    assert all(map(Proof(every=1).is_due, range(9)))


@pytest.mark.parametrize("engine", [VLLMServerEngine, SGLangEngine])
@pytest.mark.parametrize(
    ("setting", "value"),
    [("request_timeout", 0), ("request_retries", -1), ("max_concurrency", 0)],
)
def test_limits_of_requests_that_cannot_be_are_refused(engine, setting, value):
    with pytest.raises(ValueError, match=rf"{setting} .*got .*{value}.*model\.engine\.init_args"):
        engine(**{setting: value})


# The command of a vLLM server


def command(model: Model = PLAIN_MODEL, transfer=None, **launch) -> list[str]:
    return VLLMAPI("processed_logprobs", transfer).command(Launch(**launch), model, 8000)


def options(**settings) -> dict[str, str | bool]:
    """By name; True stands for one without a value."""
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


def test_what_is_not_set_is_left_to_vllm():
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
    ],
    ids=str,
)
def test_every_setting_reaches_the_command(settings, expected):
    assert options(**settings) == ALWAYS | expected


def test_a_transfer_by_nccl_is_told_to_the_server():
    told = {"--weight-transfer-config": '{"backend": "nccl"}'}
    assert options(transfer=NCCLTransfer()) == ALWAYS | told


def test_a_flag_that_is_false_takes_an_option_away():
    left = {name: value for name, value in ALWAYS.items() if name != "--enable-scale-out"}
    assert options(flags={"enable-scale-out": False}) == left


@pytest.mark.parametrize(("rank", "room"), [(1, "1"), (4, "8"), (8, "8"), (33, "64")])
def test_adapters_get_the_next_room_that_vllm_has(rank, room):
    """And two of them at a time: what runs goes on with the one before."""
    model = replace(PLAIN_MODEL, adapter_rank=rank)
    adapters = {"--enable-lora": True, "--max-lora-rank": room, "--max-loras": "2"}
    assert options(model=model) == ALWAYS | adapters


def test_an_adapter_for_which_vllm_has_no_room_is_refused():
    model = replace(PLAIN_MODEL, adapter_rank=513)
    with pytest.raises(ValueError, match=r"got 513.*Set model\.policy\.lora\.rank"):
        command(model=model)


MODULE = ["-m", "vllm.entrypoints.openai.api_server", "--model"]


def test_the_interpreter_of_another_environment_runs_the_server():
    assert command()[:4] == [sys.executable, *MODULE]
    assert command(python="/envs/vllm/bin/python")[:4] == ["/envs/vllm/bin/python", *MODULE]


def test_a_program_stands_in_place_of_interpreter_and_module():
    container = ["podman", "run", "--rm", "vllm"]
    assert command(program=container)[:5] == [*container, "--model"]


# What each server gets

NOTE_ITSELF = """
import json, os, sys
names = ("CUDA_VISIBLE_DEVICES", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "MINE")
print(json.dumps([{name: os.environ.get(name) for name in names}, sys.argv[1:]]))
"""


def what_servers_got(directory, **launch):
    """The environment and the options of each, as it saw them."""
    starts = server_starts(
        VLLMAPI("processed_logprobs"),
        Launch(program=[sys.executable, "-c", NOTE_ITSELF], **launch),
        PLAIN_MODEL,
        range(8000, 8000 + launch.get("num_servers", 1)),
        directory,
    )
    for number, start in enumerate(starts):
        server = start()
        try:
            wait_until(lambda: not server.is_running)  # noqa: B023 - called at once
        finally:
            server.end()
        yield json.loads((directory / f"server_{number}.log").read_text().splitlines()[-1])


VLLM_NEEDS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def test_each_server_has_devices_a_port_and_a_log_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    settings = {"num_servers": 2, "devices": ["0,1", "2,3"], "env": {"MINE": "x"}}
    seen = list(what_servers_got(tmp_path, **settings))
    common = VLLM_NEEDS | {"MINE": "x"}
    assert [env for env, _ in seen] == [
        common | {"CUDA_VISIBLE_DEVICES": devices} for devices in ("0,1", "2,3")
    ]
    assert [words[words.index("--port") + 1] for _, words in seen] == ["8000", "8001"]


def test_without_devices_a_server_sees_what_the_trainer_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.delenv("MINE", raising=False)
    ((env, _),) = what_servers_got(tmp_path)
    assert env == VLLM_NEEDS | {"CUDA_VISIBLE_DEVICES": "7", "MINE": None}


def test_the_users_variables_win(tmp_path):
    mine = {"VLLM_SERVER_DEV_MODE": "0", "CUDA_VISIBLE_DEVICES": "5"}
    ((env, _),) = what_servers_got(tmp_path, devices=["0"], env=mine)
    assert env["VLLM_SERVER_DEV_MODE"] == "0"
    assert env["CUDA_VISIBLE_DEVICES"] == "5"
