"""The engine for vLLM servers with a real vLLM on a CPU: logprobs, weights, restarts."""

import copy
import json
import re
import threading
import urllib.error
import urllib.request
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch
from packed_batches import batch_of
from served_engines import assert_written_by, generate, hurry
from sglang_server import free_port
from tiny import perturbed, prompt, tiny_policy, unbatched_logprobs
from vllm_environment import ROOT, VLLM_PROGRAM, launch_on_cpu, needs_vllm
from vllm_runs import in_process_checks
from vllm_servers import counter, processes_of
from vllm_settings import ARCHITECTURE, ENV, FLAGS, MAX_MODEL_LEN
from worker_processes import is_alive, wait_until

from lit_grpo.policy import LoRA
from lit_grpo.rollout import (
    EngineFailed,
    HFEngine,
    Sampling,
    Supervision,
    VLLMServerEngine,
    WeightCheck,
)
from lit_grpo.rollout.server import guard as server_guard
from lit_grpo.rollout.server.api import as_flags
from lit_grpo.rollout.server.process import ServerProcess
from lit_grpo.rollout.vllm.teacher import VLLMTeacher

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

KEY = "key-of-a-documented-server"
UPDATING = {"/collective_rpc", "/pause", "/resume", "/reset_prefix_cache", "/update_weights"}
UPDATING |= {"/init_weight_transfer_engine", "/update_weight_version", "/weight_info"}
SHORT = Sampling(max_tokens=12)
LONG = Sampling(max_tokens=200)
PATIENT = {"health_timeout": 60.0, "silence_timeout": 60.0}
PROMPTS = [prompt(text, id=text) for text in ("1+1=", "a longer one: ", "x", "22+3=" * 20)]


@contextmanager
def serving(policy, **settings):
    """Start an engine whose server has the policy's weights as version 0."""
    launch = launch_on_cpu(**settings.pop("launch", {}))
    engine = VLLMServerEngine(launch=launch, **settings)
    try:
        engine.start(policy)
        engine.load_weights(policy, 0)
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(architecture=ARCHITECTURE)


@pytest.fixture(scope="module")
def engine(policy, tmp_path_factory):
    """One server for all tests that leave it healthy; each sends the weights that it needs."""
    directory = tmp_path_factory.mktemp("engine")
    supervision = Supervision(health_interval=0.5, first_backoff=0.1, max_restarts=9, **PATIENT)
    with serving(policy, directory=str(directory), supervision=supervision) as engine:
        yield engine


@pytest.fixture
def fresh(policy, engine):
    """The engine with the policy's weights, under a new version."""
    engine.load_weights(policy, engine.version + 1)
    return engine


def changed(policy, by: float = 0.05, but: str = ""):
    """Return a copy of the policy with other weights; those of one name stay."""
    model = copy.deepcopy(policy.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != but:
                parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return SimpleNamespace(model=model, tokenizer=policy.tokenizer, source=None)


def url(engine) -> str:
    return engine._supervisor.servers[0].url


def headers(engine) -> dict[str, str]:
    return engine._supervisor.servers[0].endpoint.headers


def key_of(engine) -> str:
    return headers(engine)["Authorization"].removeprefix("Bearer ")


def ask(engine, path: str):
    request = urllib.request.Request(url(engine) + path, headers=headers(engine))
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.loads(reply.read() or b"null")


def num_generated(engine) -> float:
    """Return the number of tokens that the server has sampled since its start."""
    return counter(url(engine), "generation_tokens_total")


def generate_during(engine, action, prompts):
    """Generate until the action has been done; return the completions of each call.

    On a busy machine the action may fall between two calls.
    """
    so_far = num_generated(engine)

    def act():
        # Tokens of the last weight check may not have been counted yet; it has 64 of them.
        wait_until(lambda: num_generated(engine) > so_far + 100)
        action()

    thread = threading.Thread(target=act)
    thread.start()
    calls, is_done = [], False
    while not is_done:
        is_done = not thread.is_alive()
        calls.append(generate(engine, prompts, LONG, group_size=8))
    return calls


def test_a_completion_that_the_context_cuts_is_failed(fresh):
    longer = Sampling(max_tokens=2 * MAX_MODEL_LEN, min_tokens=MAX_MODEL_LEN - 50)
    for one in generate(fresh, PROMPTS[:1], longer):
        assert one.is_failed
        assert re.match(
            r"cut at 3\d\d tokens, before max_tokens=640: .* max_model_len", one.failure
        )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_transformers(policy, fresh, temperature):
    sampling = Sampling(max_tokens=12, temperature=temperature)
    completions = generate(fresh, PROMPTS, sampling)
    assert_written_by({fresh.version: policy.model}, PROMPTS, completions, temperature or 1.0)


def test_greedy_completions_are_those_of_the_policy_itself(policy, fresh):
    sampling = Sampling(max_tokens=12, temperature=0)
    engine = HFEngine()
    engine.load_weights(policy, 0)
    ours = generate(engine, PROMPTS, sampling, group_size=1)
    theirs = generate(fresh, PROMPTS, sampling, group_size=1)
    assert [one.token_ids for one in theirs] == [one.token_ids for one in ours]
    assert [one.text for one in theirs] == [one.text for one in ours]
    assert [one.finish_reason for one in theirs] == [one.finish_reason for one in ours]


def test_a_seed_gives_the_same_again_and_prompts_and_samples_differ(fresh):
    twins = [prompt("1+1=", id=name) for name in "ab"]
    first = generate(fresh, twins, SHORT, seed=3)
    assert first == generate(fresh, twins, SHORT, seed=3)
    assert len({one.token_ids for one in first}) == 8
    assert first != generate(fresh, twins, SHORT, seed=4)


def test_a_seed_gives_what_it_gives_in_process(fresh, tmp_path_factory):
    texts = ("12+34=", "a longer prompt", "x")
    prompts = [prompt(text, id=text) for text in texts]
    found = generate(fresh, prompts, SHORT, group_size=3, seed=0)
    expected = in_process_checks(tmp_path_factory)["sampling"]["full"]
    assert [list(one.token_ids) for one in found] == [one["token_ids"] for one in expected]


def test_stops_end_a_completion_as_they_do_with_hf_engine(policy, fresh):
    engine = HFEngine()
    engine.load_weights(policy, 0)
    prompts = [prompt(f"{n}+1=", id=str(n)) for n in range(16)]
    free = generate(engine, prompts, Sampling(max_tokens=12, temperature=0), group_size=1)
    sampled = [token for one in free for token in one.token_ids[4:8]]
    letters = {token: policy.tokenizer.decode([token]) for token in sampled}
    token = next(one for one, text in letters.items() if text.isascii() and text.isprintable())
    for stops in ({"stop_token_ids": (token,)}, {"stop": (letters[token],)}):
        for min_tokens in (0, 8):
            sampling = Sampling(max_tokens=12, temperature=0, min_tokens=min_tokens, **stops)
            ours = generate(engine, prompts, sampling, group_size=1)
            theirs = generate(fresh, prompts, sampling, group_size=1)
            assert any(one.finish_reason == "stop" for one in ours), sampling
            for mine, its in zip(ours, theirs, strict=True):
                assert its.token_ids == mine.token_ids, sampling
                assert (its.text, its.finish_reason) == (mine.text, mine.finish_reason)


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 5}])
def test_logprobs_of_a_truncated_distribution_are_refused(fresh, settings):
    with pytest.raises(ValueError, match="raw_logprobs"):
        generate(fresh, PROMPTS, Sampling(max_tokens=4, **settings))


def test_closing_early_aborts_running_requests(fresh):
    rows = iter(fresh.generate(PROMPTS, 4, Sampling(max_tokens=250), seed=1))
    next(rows)
    rows.close()
    wait_until(lambda: counter(url(fresh), "num_requests_running") == 0)


def test_the_server_is_asked_which_logprobs_it_reports(fresh):
    endpoint = fresh._supervisor.servers[0].endpoint
    assert fresh._loop.run(fresh.api.read_logprobs_mode(endpoint)) == "processed_logprobs"


def test_a_group_that_the_server_refuses_says_what_to_set(fresh):
    (*_, last) = generate(fresh, PROMPTS[:1], SHORT, group_size=3000)
    assert "model.group_size" in last.failure


def test_new_weights_are_sampled_with(policy, fresh):
    other = changed(policy)
    generate(fresh, PROMPTS, SHORT)  # fills the prefix cache with the old ones
    fresh.load_weights(other, fresh.version + 1)
    completions = generate(fresh, PROMPTS, SHORT)
    assert_written_by({fresh.version: other.model}, PROMPTS, completions)
    assert ask(fresh, "/weight_info")["weight_version"] == str(fresh.version)


def test_running_requests_continue_with_new_weights_and_label_each_token(policy, fresh):
    prompts, mixed = PROMPTS[:3], []
    model, new = policy.model, None

    def update():
        # Paused, because a request might finish before the update, which ends the pause.
        pause(url(fresh), headers(fresh))
        fresh.load_weights(new, old + 1)

    for _ in range(20):
        old, new = fresh.version, changed(policy, by=0.2)
        for found in generate_during(fresh, update, prompts):
            if any(set(one.policy_versions) == {old, old + 1} for one in found):
                mixed.append(found)
        if mixed:
            break
        model = new.model
    assert_written_by({old: model, old + 1: new.model}, prompts, mixed[0])


@pytest.mark.parametrize("top_k", [None, 5, 20])
def test_a_teacher_reads_completions_as_the_model_does(policy, fresh, monkeypatch, top_k):
    text = [49, 43, 49, 61]
    batch = batch_of(text, [[7, 8, 9], [1]], text * 30, [[2, 3], [4] * 90])
    monkeypatch.setenv("TEACHER_KEY", key_of(fresh))
    teacher = VLLMTeacher([url(fresh)], api_key_variable="TEACHER_KEY")
    with closing(teacher):
        teacher.load(policy, temperature=1.0, top_k=top_k)
        assert teacher.max_positions == MAX_MODEL_LEN - 1
        *ids, logprobs = teacher.read(batch)
    for row, length in enumerate(batch.completion_mask.sum(1).tolist()):
        if top_k is None:
            expected, _ = unbatched_logprobs(policy.model, batch, row, 1.0)
        else:
            prompt_ids = text * 30 if row > 1 else text
            completion = batch.completion_ids[row, :length].tolist()
            with torch.no_grad():
                logits = policy.model(torch.tensor([prompt_ids + completion])).logits
            every = logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
            expected = every.topk(top_k).values
            own = every.gather(1, ids[0][row, :length].long())
            torch.testing.assert_close(own, logprobs[row, :length], rtol=0, atol=1e-4)
        torch.testing.assert_close(logprobs[row, :length], expected, rtol=0, atol=1e-4)
        assert not logprobs[row, length:].any()


@pytest.fixture(scope="module")
def coarse(tmp_path_factory):
    """Yield an engine and its tied policy; its server is in half precision and ignores temperature.

    The last test with it may leave it failed.
    """
    tied = tiny_policy(architecture=ARCHITECTURE | {"tie_word_embeddings": True})
    settings = {"logprobs_mode": "raw_logprobs", "launch": {"dtype": "bfloat16"}}
    directory = tmp_path_factory.mktemp("coarse")
    with serving(tied, directory=str(directory), **settings) as engine:
        yield engine, tied


def test_half_precision_passes_its_check(coarse):
    engine, tied = coarse
    engine.load_weights(changed(tied, but="model.embed_tokens.weight"), 1)
    differences = engine.observe().means["sampler/weight_check_difference"]
    assert len(differences) == 2
    # Coarser than float32, and far from 0.1.
    assert all(1e-5 < one < 0.02 for one in differences), differences


def test_a_server_whose_logprobs_ignore_the_temperature_is_detected(coarse, tmp_path):
    engine, tied = coarse
    detected = pytest.raises(
        EngineFailed, match=r"where 0\.1 is allowed .* a --logprobs-mode .* other than configured"
    )
    settings = {
        "key": key_of(engine),
        "weight_check": WeightCheck(tolerance=0.1),
    }  # that of half precision
    with attached(url(engine), tied, tmp_path, logprobs_mode="raw_logprobs", **settings):
        pass
    with detected, attached(url(engine), tied, tmp_path, **settings):
        pass


def test_tied_embeddings_are_reloaded_or_found_to_be_stale(coarse):
    """vLLM keeps its old head on CPUs for which it packs the weights, and reloads it on others."""
    engine, tied = coarse
    new = changed(tied, by=0.2)
    found = ""
    try:
        engine.load_weights(new, 2)
    except EngineFailed as error:
        found = str(error)
    if not found:
        completions = generate(engine, PROMPTS, SHORT)
        assert_written_by({2: new.model}, PROMPTS, completions, tolerance=0.3)
        return
    assert re.search(r"where 0\.1 is allowed .* tied embeddings", found)
    with pytest.raises(EngineFailed):
        generate(engine, PROMPTS, SHORT)


def test_only_the_adapter_is_sent_and_old_ones_are_unloaded(tmp_path):
    base = tiny_policy(architecture=ARCHITECTURE)
    base.save_pretrained(tmp_path / "base")
    policy = tiny_policy(
        architecture=None,
        path=str(tmp_path / "base"),
        lora=LoRA(rank=4, target_modules=["q_proj", "v_proj"]),
    )
    with serving(
        policy, directory=str(tmp_path / "engine"), weight_check=WeightCheck(every=1)
    ) as engine:
        assert_written_by({0: policy.model}, PROMPTS, generate(engine, PROMPTS, SHORT))
        with torch.no_grad():
            for parameter in policy.trainable_parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        for version in (1, 2):
            engine.load_weights(policy, version)
            completions = generate(engine, PROMPTS, SHORT)
            assert_written_by({version: policy.model}, PROMPTS, completions)
        names = {one["id"] for one in ask(engine, "/v1/models")["data"]}
        assert names == {"policy", "policy-v1", "policy-v2"}  # the last two adapters only
        files = {path.name for path in (tmp_path / "engine/weights/v2").iterdir()}
        assert files == {"adapter_model.safetensors", "adapter_config.json"}


def test_a_launched_server_answers_only_the_run(fresh, caplog):
    assert_only_the_run_is_answered(fresh, caplog)


def assert_only_the_run_is_answered(engine, caplog) -> None:
    key = key_of(engine)
    found = statuses_without_key(url(engine), key)
    assert found.keys() >= UPDATING | {"/v1/load_lora_adapter", "/server_info", "/openapi.json"}
    assert {path for path, status in found.items() if status != 401} == {"/health", "/metrics"}
    commands = [process.cmdline() for process in processes_of(url(engine))]
    assert url(engine).rpartition(":")[2] in commands[0]
    assert not any(key in word for command in commands for word in command)
    log = engine._directory.path / "server_0.log"
    assert "Starting vLLM" in log.read_text()
    assert key not in log.read_text() + caplog.text
    assert "without it" not in caplog.text


def test_a_killed_worker_is_restarted_with_the_policys_weights(policy, fresh, caplog):
    other = changed(policy)
    fresh.load_weights(other, fresh.version + 1)
    processes = processes_of(url(fresh))
    completions = generate_during(fresh, processes[-1].kill, PROMPTS)[-1]
    assert_written_by({fresh.version: other.model}, PROMPTS, completions)
    assert fresh.observe().totals["rollout/restarts"] == 1
    assert not any(is_alive(process.pid) for process in processes)
    assert_only_the_run_is_answered(fresh, caplog)


def test_a_server_whose_engine_hangs_is_restarted_although_it_reports_to_be_healthy(policy, fresh):
    processes = processes_of(url(fresh))
    core = next(one for one in processes if "EngineCore" in one.name() or "EngineCor" in one.name())

    def suspend():
        core.suspend()
        hurry(fresh, health_timeout=5.0, silence_timeout=5.0)
        wait_until(lambda: not is_alive(core.pid), 200)
        hurry(fresh, **PATIENT)

    completions = generate_during(fresh, suspend, PROMPTS)[-1]
    assert_written_by({fresh.version: policy.model}, PROMPTS, completions)
    assert fresh.observe().totals["rollout/restarts"] == 1
    assert not any(is_alive(process.pid) for process in processes)


def documented_command() -> list[str]:
    """Return the command in the docs for servers with adapters, with the flags for a CPU."""
    text = (ROOT / "docs" / "engines.md").read_text()
    (variables, flags) = re.search(r"^(.*) vllm serve MODEL \\\n(.*)$", text, re.M).groups()
    (lora,) = re.findall(r"add `(--enable-lora [^`]+)`", text)
    words = f"{flags} {lora}".replace("10.0.0.2", "127.0.0.1").split()
    return ["env", *variables.split(), *VLLM_PROGRAM, *words, *as_flags(FLAGS)]


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    """Yield the address and the model of a server that was started as documented.

    Full weights replace the base of adapters, so a test with adapters comes first.
    """
    directory = tmp_path_factory.mktemp("documented")
    base, port = directory / "base", free_port()
    tiny_policy(architecture=ARCHITECTURE).save_pretrained(base)
    words = ["--model", str(base), "--port", str(port), "--dtype", "float32"]
    words += ["--max-model-len", str(MAX_MODEL_LEN)]
    env = ENV | {"VLLM_API_KEY": KEY}
    server = ServerProcess(documented_command() + words, env, directory / "server.log")
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: not server.is_running or is_healthy(url), 300)
        assert server.is_running, server.log_tail()
        yield SimpleNamespace(url=url, base=str(base))
    finally:
        server.stop()


@contextmanager
def attached(url: str, policy, directory, key: str = KEY, **settings):
    """Attach an engine to a running server, which has the policy's weights as version 0."""
    settings |= {"directory": str(directory), "api_key_variable": "KEY_OF_THE_SERVER"}
    engine = VLLMServerEngine(urls=[url], **settings)
    with closing(engine), pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEY_OF_THE_SERVER", key)
        engine.start(policy)
        engine.load_weights(policy, 0)
        yield engine


def test_a_server_started_as_documented_and_left_paused_can_be_used(documented, tmp_path, caplog):
    lora = LoRA(rank=4, target_modules=["q_proj", "v_proj"])
    policy = perturbed(tiny_policy(architecture=None, path=documented.base, lora=lora))
    pause(documented.url, {})
    with attached(documented.url, policy, tmp_path) as engine:
        completions = generate(engine, PROMPTS, SHORT)
        assert engine.observe().totals["rollout/restarts"] == 0
    assert is_healthy(documented.url)  # it keeps running
    assert_written_by({0: policy.model}, PROMPTS, completions)
    assert f"{documented.url} has an API key, but answers requests about its" in caplog.text


def test_vllms_own_key_leaves_the_endpoints_that_update_weights_open(documented):
    """If this fails, `key_guard` may be superfluous."""
    found = statuses_without_key(documented.url, KEY)
    guarded = {path for path, status in found.items() if status == 401}
    assert all(path.startswith(("/v1/", "/inference/")) for path in guarded)
    assert {"/inference/v1/generate", "/v1/load_lora_adapter"} <= guarded
    assert found.keys() - guarded >= UPDATING


def statuses_without_key(url: str, key: str) -> dict[str, int]:
    """Return the status with which the server answers each of its paths, without the key.

    The requests have a method that the paths do not support, so that they have no effect.
    """
    with_key = {"Authorization": f"Bearer {key}"}
    listing = urllib.request.Request(f"{url}/openapi.json", headers=with_key)
    with urllib.request.urlopen(listing, timeout=20) as reply:
        paths = [*json.load(reply)["paths"], "/openapi.json", "/docs", "/metrics"]
    return {path: status_of(url + path) for path in paths}


def status_of(address: str) -> int:
    try:
        request = urllib.request.Request(address, method="PATCH")
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


class WithoutReset:
    """Forwards all calls but those that reset the prefix cache, as a pause does, too."""

    def __init__(self, endpoint):
        self.endpoint = endpoint

    async def call(self, method, path, *args, **settings):
        if path in ("/pause", "/reset_prefix_cache", "/resume"):
            return {"success": True}
        return await self.endpoint.call(method, path, *args, **settings)


def test_a_prefix_cache_that_outlives_an_update_is_detected(policy, documented, tmp_path):
    detected = pytest.raises(EngineFailed, match=r"differ .* by [\d.]+ .* 0\.005 is allowed")
    with detected as error, attached(documented.url, policy, tmp_path) as engine:
        update = engine.api.update_weights
        engine.api.update_weights = lambda endpoint, *rest: update(WithoutReset(endpoint), *rest)
        engine.load_weights(changed(policy), 1)
    assert re.search(r"\(mean -[\d.]+, trainer -[\d.]+\)", str(error.value))


def pause(url: str, headers: dict[str, str]) -> None:
    """Pause the server, as the first half of an update does."""
    request = urllib.request.Request(f"{url}/pause?mode=keep", data=b"", headers=headers)
    urllib.request.urlopen(request, timeout=20).close()


def is_healthy(url: str) -> bool:
    with suppress(OSError):
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
        return True
    return False


def test_nothing_is_left_after_closing(fresh):
    """The last test, since the others share the engine."""
    processes = processes_of(url(fresh))
    shared = server_guard.shared_memory(processes[0].pid)
    directory = fresh._directory.path
    generate(fresh, PROMPTS, SHORT)
    assert (directory / "weights").exists()
    fresh.close()
    assert not any(is_alive(process.pid) for process in processes)
    assert shared
    assert not any(path.exists() for path in shared)
    assert [path.name for path in directory.iterdir()] == ["server_0.log"]
