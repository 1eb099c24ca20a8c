"""The benchmark of engines: both clients send the same requests, and only one run overlaps."""

import importlib
import json
import time
from dataclasses import replace

import pytest
import torch
from paths import SUPPORT
from vllm_environment import PYTHON, VLLM_PROGRAM, needs_vllm

engines, overlap, processes, workloads = (
    importlib.import_module(f"_benchmark.{name}")
    for name in ("engines", "overlap", "processes", "workloads")
)

TINY = workloads.SIZES["tiny"]
SHORT = replace(
    workloads.WORKLOADS["short_equal"], num_prompts=4, group_size=8, prompt_tokens=6, max_tokens=4
)
REPETITIONS = processes.Repetitions(rounds=1, steps=1)
NUM_STEPS = 5


def test_without_vllm_the_figure_is_skipped_with_a_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIT_GRPO_VLLM_VENV", str(tmp_path))
    assert list(engines.compare_client(REPETITIONS)) == []
    assert "scripts/setup_vllm_cpu" in capsys.readouterr().out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A file with a line per request for completions that the server has received."""
    path = tmp_path_factory.mktemp("requests") / "bodies.jsonl"
    path.touch()
    return path


@pytest.fixture(scope="module")
def served(recorded):
    """Yield the benchmark's engine and policy, with a server that records its requests."""
    launch = engines.launch_on_cpu(PYTHON)
    flags = launch.flags | {"middleware": "recorded_requests.Recorder"}
    env = launch.env | {"PYTHONPATH": str(SUPPORT), "RECORDED_REQUESTS": str(recorded)}
    launch = replace(launch, program=VLLM_PROGRAM, flags=flags, env=env)
    with engines.running_engine(launch) as engine_and_policy:
        yield engine_and_policy


def requests_during(recorded, send):
    """Return the requests that the server receives during a call, sorted."""
    num_before = len(recorded.read_text().splitlines())
    send()
    bodies = map(json.loads, recorded.read_text().splitlines()[num_before:])
    return sorted(bodies, key=lambda body: body["token_ids"])


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_engine_and_the_bare_client_send_the_same_requests(served, recorded):
    arguments = engines.generation_arguments(*served, num_prompts=3, group_size=2, max_tokens=4)
    ours, bare, other = (
        requests_during(recorded, lambda send=send, seed=seed: send(*arguments, seed))
        for send, seed in (
            (engines.engine_seconds, 7),
            (engines.bare_client_seconds, 7),
            (engines.bare_client_seconds, 8),
        )
    )
    assert ours == bare
    assert ours != other  # the server could answer a repeated seed from its cache
    assert len(ours) == 3
    for body in ours:
        assert len(body["token_ids"]) == 16
        assert body["sampling_params"]["n"] == 2
        assert body["sampling_params"]["max_tokens"] == 4


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_client_is_timed_beside_a_bare_one(served, recorded):
    figures = []
    requests = requests_during(
        recorded, lambda: figures.append(engines.compare_client_on(*served, 3, 2, 4, REPETITIONS))
    )
    (figure,) = figures
    assert (figure.figure, figure.against) == ("engine client", "a bare asynchronous client")
    assert (figure.case, figure.unit) == ("3 x 2 completions of 4 tokens", "s")
    assert figure.target == pytest.approx(1 / 0.95)
    assert min(figure.ours, figure.other) > 0
    runs = 1 + engines.RUNS_PER_ROUND  # one is a warm-up
    assert len(requests) == 2 * runs * 3  # of both clients, one per prompt


class WatchingEngine(type(overlap.sleeping_engine(0.0))):
    """Wait in each generation but the first until the policy changes, for some seconds at most."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.saw_an_update = []
        """One entry per generation."""

    def load_weights(self, policy, version):
        self.weight = policy.model.get_input_embeddings().weight
        self.loaded = self.weight.detach().clone()
        super().load_weights(policy, version)

    def generate(self, prompts, group_size, sampling, *, seed):
        is_first, loaded = not self.saw_an_update, self.loaded
        self.saw_an_update.append(not is_first and self.weight_changes_from(loaded))
        yield from super().generate(prompts, group_size, sampling, seed=seed)

    def weight_changes_from(self, loaded):
        end = time.monotonic() + self.seconds
        while (is_same := torch.equal(self.weight, loaded)) and time.monotonic() < end:
            time.sleep(0.01)
        return not is_same


def test_a_run_with_off_policyness_samples_while_the_policy_is_updated():
    engine = WatchingEngine(seconds=60)
    overlap.step_seconds(SHORT, TINY, engine, 1, NUM_STEPS)
    assert engine.saw_an_update == [False] + [True] * (NUM_STEPS - 1)


def test_a_run_without_off_policyness_does_not_sample_while_the_policy_is_updated():
    engine = WatchingEngine(seconds=0.1)
    overlap.step_seconds(SHORT, TINY, engine, 0, NUM_STEPS)
    assert engine.saw_an_update == [False] * NUM_STEPS


def test_warm_up_steps_are_left_out_and_a_generation_takes_its_configured_time():
    seconds = overlap.step_seconds(SHORT, TINY, overlap.sleeping_engine(0.1), 0, NUM_STEPS)
    assert len(seconds) == NUM_STEPS - 1 - overlap.WARM_UP_STEPS  # the first has no start time
    assert min(seconds) >= 0.1


@pytest.mark.slow
def test_overlap_is_timed_beside_the_same_run_without_it(monkeypatch):
    monkeypatch.setitem(overlap.WORKLOADS, "short_equal", SHORT)
    (figure,) = overlap.compare_overlap(TINY, REPETITIONS)
    assert (figure.figure, figure.against) == ("overlap", "the same with 0")
    assert figure.case == "generation and update equally long, max_head_offpolicyness 1"
    assert (figure.unit, figure.target) == ("s", 0.65)
    assert min(figure.ours, figure.other) > 0
    update = figure.details[""]["update (s)"]
    assert figure.other > update  # generation takes as long again
