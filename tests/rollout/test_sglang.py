"""The engine for SGLang against a server with SGLang's API and a real tiny model."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from chat_models import IM_END, turn_ending_policy
from served_engines import (
    LORA,
    PLAIN,
    PROGRAM,
    PROMPTS,
    SEEDED,
    assert_written_by,
    generate,
    launch,
    launched_servers,
    serving,
)
from sglang_server import running_server
from tiny import perturbed, prompt, tiny_policy
from worker_processes import wait_until

from lit_grpo.policy import LoRA
from lit_grpo.rollout import EngineFailed, HFEngine, Launch, Sampling
from lit_grpo.rollout.server.api import ServedModel
from lit_grpo.rollout.sglang import SGLangAPI

GREEDY = replace(PLAIN, temperature=0.0)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def still(directory):
    """A server whose weights no test changes."""
    with running_server(directory, **SEEDED) as server:
        yield server


@pytest.fixture(scope="module")
def engine(still, policy):
    with serving(policy, version=3, urls=[still.url]) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared(directory):
    with running_server(directory, **SEEDED, **LORA) as server:
        yield server


@pytest.fixture
def server(shared, directory):
    """A server without faults and with its first weights."""
    shared.faults()
    weights = {"model_path": str(directory), "weight_version": "default"}
    assert shared.post("/update_weights_from_disk", **weights)[0] == 200
    return shared


def hf_completions(policy, sampling, *, group_size=1):
    engine = HFEngine()
    engine.load_weights(policy, 3)
    return generate(engine, PROMPTS, sampling, group_size=group_size)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8, "top_k": 20}, {"top_k": 1}],
    ids=str,
)
def test_logprobs_are_those_of_teacher_forcing_at_the_temperature(engine, policy, settings):
    sampling = replace(PLAIN, **settings)
    completions = generate(engine, PROMPTS, sampling)
    assert_written_by({3: policy.model}, PROMPTS, completions, sampling.temperature)
    assert {completion.finish_reason for completion in completions} <= {"stop", "length"}


def test_every_token_is_among_the_top_k(engine, policy):
    for row, completion in enumerate(generate(engine, PROMPTS, replace(PLAIN, top_k=3))):
        ids = PROMPTS[row // 4].token_ids + completion.token_ids
        logits = policy.model(torch.tensor([ids])).logits[0, -len(completion.token_ids) - 1 : -1]
        top = logits.topk(3).indices.tolist()
        assert all(token in kept for token, kept in zip(completion.token_ids, top, strict=True))


def same_as_hf(engine, policy, sampling):
    """Return greedy completions, and assert that the policy's own engine gives the same.

    Before ``min_tokens`` SGLang's logprobs are those of the distribution without end tokens.
    """
    ours = generate(engine, PROMPTS, sampling, group_size=1)
    theirs = hf_completions(policy, sampling)
    least = sampling.min_tokens
    for one, other in zip(ours, theirs, strict=True):
        expected = pytest.approx(other.sampler_logprobs[least:], abs=1e-4)
        assert one.sampler_logprobs[least:] == expected
        assert replace(one, sampler_logprobs=()) == replace(other, sampler_logprobs=())
    return ours


def test_greedy_completions_are_those_of_the_policy_itself(engine, policy):
    same_as_hf(engine, policy, GREEDY)


def test_a_stop_token_ends_a_completion_and_stays_in_it(engine, policy):
    stop = same_as_hf(engine, policy, GREEDY)[0].token_ids[3]
    stopped = same_as_hf(engine, policy, replace(GREEDY, stop_token_ids=(stop,)))[0]
    assert stopped.token_ids[-1] == stop
    assert stopped.finish_reason == "stop"


def test_a_base_model_ends_at_the_end_of_a_turn_of_its_chat_template(tmp_path):
    policy = turn_ending_policy(tmp_path / "tokenizer", PROMPTS[0])
    policy.save_pretrained(tmp_path / "model")
    with (
        running_server(tmp_path / "model", **SEEDED) as server,
        serving(policy, version=3, urls=[server.url]) as engine,
    ):
        first = same_as_hf(engine, policy, GREEDY)[0]
    assert (len(first.token_ids), first.finish_reason) == (4, "stop")
    assert first.token_ids[-1] == policy.tokenizer.convert_tokens_to_ids(IM_END)


def test_no_completion_is_shorter_than_min_tokens(engine, policy):
    stops = tuple(range(200))
    sampling = replace(GREEDY, stop_token_ids=stops, min_tokens=5)
    assert all(len(one.token_ids) >= 5 for one in same_as_hf(engine, policy, sampling))
    drawn = generate(engine, PROMPTS, replace(sampling, temperature=1.0))
    assert not any(set(one.token_ids[:5]) & set(stops) for one in drawn if len(one.token_ids) > 5)


def test_a_stop_string_cuts_the_text_but_not_the_tokens(engine, policy):
    texts = [one.text for one in hf_completions(policy, GREEDY)]
    stop = next(text[i] for text in texts for i in range(1, len(text)) if text[i].isascii())
    cut = same_as_hf(engine, policy, replace(GREEDY, stop=(stop, "never to be seen")))
    assert not any(stop in one.text for one in cut)
    assert any(stop in policy.tokenizer.decode(one.token_ids) for one in cut)


def test_stop_strings_together_with_min_tokens_are_refused(engine):
    with pytest.raises(ValueError, match="Set model.sampling.min_tokens"):
        generate(engine, PROMPTS, replace(PLAIN, stop=("a",), min_tokens=2))


def test_the_seed_decides_and_rows_of_a_group_differ(engine):
    first, again, other = (generate(engine, PROMPTS, PLAIN, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({completion.token_ids for completion in first}) == len(first)


def test_two_prompts_with_the_same_text_get_different_completions(engine):
    twins = [prompt("1+1=", id="a"), prompt("1+1=", id="b")]
    completions = generate(engine, twins, PLAIN)
    assert len({completion.token_ids for completion in completions}) == 8


def test_a_completion_depends_neither_on_the_load_nor_on_how_it_is_streamed(
    engine, policy, directory
):
    expected = generate(engine, PROMPTS, PLAIN)
    with (
        running_server(directory, enable_deterministic_inference=True) as other,
        serving(policy, version=3, urls=[other.url], max_concurrency=1) as alone,
    ):
        other.reset_count()
        completions = generate(alone, PROMPTS, PLAIN)
        assert other.log()["most_unfinished"] == 1
    for one, same in zip(completions, expected, strict=True):
        assert one.token_ids == same.token_ids
        assert one.sampler_logprobs == pytest.approx(same.sampler_logprobs, abs=1e-4)


def test_closing_the_iterator_leaves_no_request_on_the_server(policy, server):
    with serving(policy, urls=[server.url]) as engine:
        dropped = server.log()["dropped"]
        server.faults(hold_after_tokens=3)  # some end before with one of their many stop tokens
        sampling = Sampling(max_tokens=100, stop_token_ids=tuple(range(60)))
        completions = engine.generate(PROMPTS, 4, sampling, seed=0)
        next(completions)
        wait_until(lambda: server.log()["held"] > 0)
        completions.close()
        wait_until(lambda: server.log()["generating"] == 0)
        assert server.log()["dropped"] > dropped


def test_a_completion_that_the_servers_context_cuts_is_failed(engine):
    longest = prompt("x" * 100)
    (cut,) = generate(engine, [longest], Sampling(max_tokens=28, top_k=1), group_size=1)
    assert cut.is_failed, cut
    (refused,) = generate(engine, [longest], Sampling(max_tokens=29), group_size=1)
    assert refused.is_failed
    assert "context length" in refused.failure


@pytest.mark.slow
def test_full_weights_are_sampled_with_and_checked(tmp_path):
    policy = tiny_policy(seed=1)
    with serving(policy, launch=launch(), directory=str(tmp_path)) as engine:
        for version in (0, 7, 8, 9):
            engine.load_weights(policy, version)
            completions = generate(engine, PROMPTS, PLAIN)
            assert_written_by({version: policy.model}, PROMPTS, completions)
            perturbed(policy, seed=version)
        differences = engine.observe().means["sampler/weight_check_difference"]
        assert len(differences) == 3  # at the first three updates; then 4, 8, ... updates later
        assert max(differences) < 1e-4
    assert not (tmp_path / "weights").exists()
    assert (tmp_path / "server_0.log").exists()


def test_running_completions_continue_with_the_new_weights_and_report_it(server):
    old, new = tiny_policy(), perturbed(tiny_policy())
    sampling = Sampling(max_tokens=40)
    with ThreadPoolExecutor(1) as pool, serving(old, version=1, urls=[server.url]) as engine:
        server.faults(hold_after_tokens=2)
        running = pool.submit(generate, engine, PROMPTS, sampling)
        wait_until(lambda: server.log()["held"] == 12)
        engine.load_weights(new, 2)
        server.faults()
        completions = running.result(60)
    assert {1, 2} in [set(completion.policy_versions) for completion in completions]
    assert_written_by({1: old.model, 2: new.model}, PROMPTS, completions)


@contextmanager
def serving_adapter(policy, server, **settings):
    with serving(policy, urls=[server.url], weight_sync="adapter", **settings) as engine:
        yield engine


def test_only_adapters_are_sent_and_old_ones_are_unloaded(server, directory, tmp_path):
    policy = perturbed(tiny_policy(lora=LoRA(rank=4, target_modules=["q_proj", "v_proj"])))
    with serving_adapter(policy, server, directory=str(tmp_path)) as engine:
        for version in (0, 1, 2):
            engine.load_weights(policy, version)
            completions = generate(engine, PROMPTS, PLAIN)
            assert_written_by({version: policy.model}, PROMPTS, completions)
            perturbed(policy, seed=version)
        files = {path.name for path in (tmp_path / "weights" / "v2").iterdir()}
        assert "adapter_model.safetensors" in files
        assert "model.safetensors" not in files
        assert [is_loaded(server, f"policy-v{version}") for version in (0, 1, 2)] == [
            False, True, True,
        ]  # fmt: skip


def is_loaded(server, name):
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "lora_path": name}
    status, _ = server.post("/generate", **body)
    return status == 200


def test_an_adapter_with_the_same_name_from_an_earlier_run_is_replaced(server):
    for seed in (1, 2):
        policy = tiny_policy(lora=LoRA(rank=4, target_modules=["q_proj", "v_proj"]))
        with serving_adapter(perturbed(policy, seed=seed), server) as engine:
            completions = generate(engine, PROMPTS, PLAIN)
        assert_written_by({0: policy.model}, PROMPTS, completions)


def test_a_launched_server_accepts_the_policys_adapters(tmp_path):
    policy = perturbed(tiny_policy(lora=LoRA(rank=4)))
    with serving(policy, launch=launch()) as engine:
        (server,) = launched_servers()
        assert is_loaded(server, "policy-v0")
        assert_written_by({0: policy.model}, PROMPTS, generate(engine, PROMPTS, PLAIN))


@pytest.mark.parametrize("settings", [{}, {"lora": LoRA(rank=4, target_modules=["q_proj"])}])
def test_an_update_that_only_seems_to_happen_fails_the_engine_with_both_numbers(server, settings):
    policy = perturbed(tiny_policy(**settings), seed=9)
    with serving(policy, version=-1, urls=[server.url]) as engine:
        server.faults(stale_updates=1)
        with pytest.raises(EngineFailed, match=r"mean -\d+\.\d+, trainer -\d+\.\d+") as failure:
            engine.load_weights(policy, 4)
        with pytest.raises(EngineFailed):
            generate(engine, PROMPTS, PLAIN)
    assert "differ from the trainer's by" in str(failure.value)


def test_settings_become_sglangs_options_and_the_users_flags_override_them():
    settings = Launch(
        python="/env/bin/python",
        tensor_parallel_size=2,
        memory_fraction=0.8,
        max_model_len=4096,
        flags={"max-running-requests": 64, "enable-deterministic-inference": False},
    )
    model = ServedModel(path="some/model", tokenizer="mine", dtype="bfloat16", adapter_rank=None)
    command = SGLangAPI().command(settings, model, 30000)
    assert command[:3] == ["/env/bin/python", "-m", "sglang.launch_server"]
    words = " ".join(command)
    for option in (
        "--model-path some/model", "--tokenizer-path mine", "--port 30000", "--host 127.0.0.1",
        "--dtype bfloat16",
        "--tensor-parallel-size 2", "--mem-fraction-static 0.8", "--context-length 4096",
        "--max-running-requests 64", "--incremental-streaming-output",
    ):  # fmt: skip
        assert option in words
    assert "deterministic" not in words
    assert "lora" not in words


def test_adapters_need_their_rank_and_modules_and_one_copy_of_the_weights():
    model = ServedModel(
        path="m",
        tokenizer="m",
        dtype="float32",
        adapter_rank=8,
        adapter_modules=("k_proj", "q_proj"),
    )
    command = SGLangAPI().command(Launch(program=PROGRAM), model, 1)
    assert command[:2] == PROGRAM
    words = " ".join(command)
    assert "--enable-lora --max-lora-rank 8 --lora-target-modules k_proj q_proj" in words
    with pytest.raises(ValueError, match="num_servers"):
        SGLangAPI().command(Launch(data_parallel_size=2), model, 1)
