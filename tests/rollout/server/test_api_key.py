"""Servers with an API key: nobody else can use or read it, and every request of the run has it."""

import logging
import stat

import psutil
import pytest
from served_engines import (
    LORA,
    PLAIN,
    PROMPTS,
    SEEDED,
    assert_same,
    failure_of,
    generate,
    launch,
    launched_servers,
    serving,
    wait_until_ready,
)
from sglang_server import RunningServer, running_server

from lit_grpo.rollout import Launch, SGLangEngine, VLLMServerEngine
from lit_grpo.rollout.server.api_key import Guard, choose_key, write_private
from lit_grpo.types import UserError

KEY = "test-key-of-the-server"
GUARDED = ["/model_info", "/server_info", "/generate", "/abort_request", "/pause_generation"]
GUARDED += ["/update_weights_from_disk", "/load_lora_adapter", "/flush_cache", "/v1/models"]


@pytest.fixture(scope="module")
def locked(directory):
    with running_server(directory, api_key=KEY, **SEEDED, **LORA) as server:
        yield server


@pytest.fixture
def exported(monkeypatch):
    monkeypatch.setenv("MY_SERVERS_KEY", KEY)


def statuses(server, paths) -> set[int]:
    """Return what the server answers to requests without a key."""
    stranger = RunningServer(server.process, server.port)
    return {stranger.get(path)[0] for path in paths} | {stranger.post(path)[0] for path in paths}


@pytest.mark.parametrize("engine", [VLLMServerEngine, SGLangEngine])
@pytest.mark.parametrize("name", ["sk-1234", "", "lower_case", "MY KEY"])
def test_a_key_in_place_of_the_name_of_its_variable_is_refused_and_not_shown(engine, name):
    with pytest.raises(UserError, match="api_key_variable to its name") as error:
        engine(api_key_variable=name)
    assert not name or name not in str(error.value)


@pytest.mark.parametrize("flag", ["api-key", "api_key", "admin-api-key"])
def test_a_key_on_the_command_line_is_refused_and_not_shown(flag):
    with pytest.raises(UserError, match=r"launch\.flags .*api_key_variable") as error:
        Launch(flags={flag: KEY})
    assert KEY not in str(error.value)


@pytest.mark.parametrize("value", ["", "two words", "a\nline", "schlüssel"])
def test_a_variable_without_a_key_is_named(value, monkeypatch):
    monkeypatch.setenv("MY_SERVERS_KEY", value)
    with pytest.raises(UserError, match="environment variable MY_SERVERS_KEY must hold"):
        choose_key("MY_SERVERS_KEY", is_launched=False)


def test_launched_servers_get_a_new_random_key_and_attached_ones_none(exported):
    assert choose_key(None, is_launched=False) is None
    keys = {choose_key(None, is_launched=True) for _ in range(5)}
    assert len(keys) == 5
    assert all(len(key) == 64 for key in keys)
    assert choose_key("MY_SERVERS_KEY", is_launched=True) == KEY


def test_a_private_file_can_be_read_by_this_user_only(tmp_path):
    path = tmp_path / "key" / "file"
    for text in ("first", "second"):
        write_private(path, text)
        assert path.read_text() == text
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_guard_does_not_show_its_key():
    assert KEY not in repr(Guard(api_key=KEY, flags={}, env={"VLLM_API_KEY": KEY}))


def test_every_request_to_an_attached_server_has_the_key(
    policy, locked, undisturbed, exported, caplog
):
    settings = {"urls": [locked.url], "api_key_variable": "MY_SERVERS_KEY"}
    with caplog.at_level(logging.DEBUG), serving(policy, **settings) as engine:
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        assert engine.observe().totals["rollout/restarts"] == 0
    assert KEY not in caplog.text
    assert "without it" not in caplog.text


def test_a_server_that_requires_a_key_says_how_to_give_it(policy, locked):
    why = failure_of(policy, urls=[locked.url], supervision={"max_restarts": 0})
    assert "401" in why
    assert "set model.engine.init_args.api_key_variable" in why


def test_a_server_that_ignores_its_key_gets_a_warning(policy, server, exported, caplog):
    with serving(policy, urls=[server.url], api_key_variable="MY_SERVERS_KEY"):
        pass
    (warning,) = [one for one in caplog.messages if "API key" in one]
    assert warning.startswith(
        f"{server.url} has an API key, but answers requests about its weights"
    )
    assert KEY not in caplog.text


@pytest.mark.slow
def test_a_launched_server_answers_only_the_run_also_after_a_restart(
    policy, undisturbed, tmp_path, caplog
):
    directory = tmp_path / "engine"
    with (
        caplog.at_level(logging.DEBUG),
        serving(policy, launch=launch(), directory=str(directory)) as engine,
    ):
        (first,) = launched_servers()
        key = engine._supervisor.servers[0].endpoint.headers["Authorization"].split()[1]
        commands = " ".join(word for one in lineage(first.pid) for word in one.cmdline())
        assert str(first.port) in commands
        assert key not in commands
        assert statuses(first, GUARDED) == {401}
        assert statuses(first, ["/health"]) == {200}
        first.kill()
        assert_same(generate(engine, PROMPTS, PLAIN), undisturbed[PLAIN])
        (second,) = launched_servers()
        assert second.pid != first.pid
        assert statuses(second, GUARDED) == {401}
        log = directory / "server_0.log"
        assert key in log.read_text()  # SGLang writes all its arguments, so:
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert stat.S_IMODE((directory / "api_key").stat().st_mode) == 0o700
        assert engine._supervisor.servers[0].log_tail  # which is quoted in the run's log
        assert key not in caplog.text
    assert not (directory / "api_key").exists()


def lineage(pid: int) -> list[psutil.Process]:
    """Return a launched server and its guard."""
    process = psutil.Process(pid)
    return [process, process.parent(), *process.children(recursive=True)]


@pytest.mark.slow
def test_two_launched_servers_have_the_key_in_the_variable(policy, exported):
    settings = {"launch": launch(num_servers=2), "api_key_variable": "MY_SERVERS_KEY"}
    with serving(policy, **settings) as engine:
        wait_until_ready(engine)
        for server in launched_servers():
            assert server.headers == {"Authorization": f"Bearer {KEY}"}
            assert server.get("/model_info")[0] == 200
            assert statuses(server, GUARDED) == {401}
