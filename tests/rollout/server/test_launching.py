"""Addresses and ports of servers, warnings about public ones, and the environment of each."""

import json
import logging
import os
import shutil
import socket
import sys
from importlib.metadata import version

import pytest
from served_engines import failure_of
from worker_processes import wait_until

from lit_grpo.rollout import Launch, VLLMServerEngine
from lit_grpo.rollout.server.api import ServedModel
from lit_grpo.rollout.server.api_key import Guard
from lit_grpo.rollout.server.launching import (
    check_program,
    choose_ports,
    installed_version,
    process_starters,
    served_model,
    warn_of_public_address,
)
from lit_grpo.rollout.vllm.server import VLLMAPI
from lit_grpo.types import UserError

MODEL = ServedModel(
    path="/models/small", tokenizer="/tokenizers/mine", dtype="bfloat16", adapter_rank=None
)
NO_GUARD = Guard(api_key="", flags={}, env={})
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
def test_any_other_address_gets_a_warning(host, caplog):
    (warning,) = warnings_of(host, caplog)
    assert warning.startswith(f"http://{host}:8000 is not a loopback or private address")
    assert "make the server execute code" in warning


@pytest.fixture
def names(monkeypatch):
    """Addresses of host names; names without addresses are unknown."""
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


def test_an_unknown_host_name_gets_no_warning(names, caplog):
    assert warnings_of("nowhere", caplog) == []


def test_an_ipv6_host_is_bare_in_the_command_and_in_brackets_in_the_url(policy, tmp_path):
    missing = Launch(program=["no-such-program"], host="::1")
    quick = {"max_restarts": 0}
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    why = failure_of(policy, launch=missing, supervision=quick, directory=str(tmp_path))
    assert "server at http://[::1]:" in why
    assert " --host ::1 " in (tmp_path / "server_0.log").read_text()


@pytest.mark.parametrize(
    "url", ["10.0.0.2:8000", "10.0.0.2", "http://", "http://[::1", "http://a:b", "ftp://a"]
)
def test_a_url_that_names_no_server_is_refused(url):
    with pytest.raises(ValueError, match=r"such as 'http://.*model\.engine\.init_args\.urls"):
        VLLMServerEngine(urls=[url], directory="/shared")


@pytest.mark.parametrize("host", ["8.8.8.8", "no-such-host.invalid", "[::1]"])
def test_an_address_of_another_machine_is_refused_as_host(host):
    with pytest.raises(ValueError, match=r"Set model\.engine\.init_args\.launch\.host"):
        choose_ports(Launch(host=host))


def test_a_server_is_not_started_if_another_program_took_its_port_meanwhile(tmp_path):
    api = VLLMAPI("processed_logprobs")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (start,) = process_starters(api, Launch(port=port), MODEL, [port], tmp_path, NO_GUARD)
        with pytest.raises(OSError, match="in use"):
            start()
    assert list(tmp_path.iterdir()) == []


def test_a_policy_from_nowhere_is_written_with_its_tokenizer(policy, tmp_path):
    model = served_model(policy, tmp_path, dtype="float32", with_adapters=False, is_writer=True)
    assert model.path == str(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "tokenizer" / "tokenizer.json").exists()
    assert model.adapter_rank is None


PRINT_SETTINGS = """
import json, os, sys
names = ("CUDA_VISIBLE_DEVICES", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "MINE")
print(json.dumps([{name: os.environ.get(name) for name in names}, sys.argv[1:]]))
"""


def settings_of_servers(directory, **launch):
    """Yield the environment and the options that each launched server sees."""
    starters = process_starters(
        VLLMAPI("processed_logprobs"),
        Launch(program=[sys.executable, "-c", PRINT_SETTINGS], **launch),
        MODEL,
        range(8000, 8000 + launch.get("num_servers", 1)),
        directory,
        NO_GUARD,
    )
    for number, start in enumerate(starters):
        server = start()
        try:
            wait_until(lambda: not server.is_running)  # noqa: B023 - called at once
        finally:
            server.stop()
        yield json.loads((directory / f"server_{number}.log").read_text().splitlines()[-1])


VLLM_NEEDS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def test_each_server_has_its_own_devices_port_and_log(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    settings = {"num_servers": 2, "devices": ["0,1", "2,3"], "env": {"MINE": "x"}}
    seen = list(settings_of_servers(tmp_path, **settings))
    common = VLLM_NEEDS | {"MINE": "x"}
    assert [env for env, _ in seen] == [
        common | {"CUDA_VISIBLE_DEVICES": devices} for devices in ("0,1", "2,3")
    ]
    assert [words[words.index("--port") + 1] for _, words in seen] == ["8000", "8001"]


def test_without_devices_a_server_sees_those_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.delenv("MINE", raising=False)
    ((env, _),) = settings_of_servers(tmp_path)
    assert env == VLLM_NEEDS | {"CUDA_VISIBLE_DEVICES": "7", "MINE": None}


def test_the_users_variables_override_the_others(tmp_path):
    mine = {"VLLM_SERVER_DEV_MODE": "0", "CUDA_VISIBLE_DEVICES": "5"}
    ((env, _),) = settings_of_servers(tmp_path, devices=["0"], env=mine)
    assert env["VLLM_SERVER_DEV_MODE"] == "0"
    assert env["CUDA_VISIBLE_DEVICES"] == "5"


def test_a_program_that_can_be_started_is_told_with_the_version_of_its_package():
    assert check_program(Launch(), "torch") == (sys.executable, version("torch"))
    assert check_program(Launch(program=["sh", "serve.sh"]), "vllm") == (shutil.which("sh"), "")
    assert check_program(Launch(), "") == (sys.executable, "")


def test_a_package_may_come_from_a_distribution_of_another_name_or_from_none(tmp_path, monkeypatch):
    assert installed_version(sys.executable, "yaml") == version("pyyaml")
    (tmp_path / "of_no_distribution.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert installed_version(sys.executable, "of_no_distribution") == "of unknown version"
    assert installed_version(sys.executable, "no_such_package") == ""


@pytest.mark.parametrize(
    ("launch", "package", "said"),
    [
        (Launch(python="no/python"), "vllm", r"no program no/python .* Set \S*launch\.python\.$"),
        (Launch(program=["no/serve"]), "", r"no program no/serve .* Set \S*launch\.program\.$"),
        (
            Launch(),
            "no_such_package",
            r"no package no_such_package, .* or set \S*launch\.python",
        ),
    ],
)
def test_a_server_that_cannot_be_started_is_told_what_is_missing(launch, package, said):
    with pytest.raises(UserError, match=said):
        check_program(launch, package)
