"""The benchmark's figures of engines: both sides do the same, and one of them overlaps."""

import importlib
import json
import time
from dataclasses import replace

import pytest
import torch
from paths import SUPPORT
from vllm_environment import PYTHON, needs_vllm

engines, overlap, turns, workloads = (
    importlib.import_module(f"_benchmark.{name}")
    for name in ("engines", "overlap", "turns", "workloads")
)

TINY = workloads.SIZES["tiny"]
SHORT = replace(
    workloads.WORKLOADS["short_equal"], num_prompts=4, group_size=8, prompt_tokens=6, max_tokens=4
)
EFFORT = turns.Effort(rounds=1, steps=1)
NUM_STEPS = 5


# Requests


def test_without_vllm_there_is_no_figure_and_a_word_about_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIT_GRPO_VLLM_VENV", str(tmp_path))
    assert list(engines.compare_client(EFFORT)) == []
    assert "scripts/setup_vllm_cpu" in capsys.readouterr().out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The requests for completions that a server has got, a line each."""
    path = tmp_path_factory.mktemp("requests") / "bodies.jsonl"
    path.touch()
    return path


@pytest.fixture(scope="module")
def served(recorded):
    """The benchmark's engine and policy, and a server that keeps its requests."""
    launch = engines.launch_on_cpu(PYTHON)
    flags = launch.flags | {"middleware": "recorded_requests.Recorder"}
    env = launch.env | {"PYTHONPATH": str(SUPPORT), "RECORDED_REQUESTS": str(recorded)}
    with engines.served(replace(launch, flags=flags, env=env)) as served:
        yield served


def requests_of(recorded, send):
    """What the server is asked meanwhile, in an order of its own."""
    num_before = len(recorded.read_text().splitlines())
    send()
    bodies = map(json.loads, recorded.read_text().splitlines()[num_before:])
    return sorted(bodies, key=lambda body: body["token_ids"])


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_engine_and_the_bare_client_send_the_same_requests(served, recorded):
    asks = engines.asks_of(*served, num_prompts=3, group_size=2, max_tokens=4)
    ours, bare, other = (
        requests_of(recorded, lambda send=send, seed=seed: send(*asks, seed))
        for send, seed in (
            (engines.engine_seconds, 7), (engines.bare_seconds, 7), (engines.bare_seconds, 8),
        )
    )  # fmt: skip
    assert ours == bare
    assert ours != other  # a repeated seed would be answered from what is cached
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
    requests = requests_of(
        recorded, lambda: figures.append(engines.client_figure(*served, 3, 2, 4, EFFORT))
    )
    (figure,) = figures
    assert (figure.figure, figure.against) == ("engine client", "a bare asynchronous client")
    assert (figure.case, figure.unit) == ("3 x 2 completions of 4 tokens", "s")
    assert figure.target == pytest.approx(1 / 0.95)
    assert min(figure.ours, figure.other) > 0
    laps = 1 + engines.LAPS_A_ROUND  # one warms up
    assert len(requests) == 2 * laps * 3  # of both, a request a prompt


# Sampling during the update


class Watching(type(overlap.waiting_engine(0.0))):
    """Ends no generation but the first before the policy has changed, or so many seconds."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.saw_an_update = []
        """By each generation."""

    def load_weights(self, policy, version):
        self.weight = policy.model.get_input_embeddings().weight
        self.loaded = self.weight.detach().clone()
        super().load_weights(policy, version)

    def generate(self, prompts, group_size, sampling, *, seed):
        is_first, loaded = not self.saw_an_update, self.loaded
        self.saw_an_update.append(not is_first and self.sees_another_weight_than(loaded))
        yield from super().generate(prompts, group_size, sampling, seed=seed)

    def sees_another_weight_than(self, loaded):
        end = time.monotonic() + self.seconds
        while (is_same := torch.equal(self.weight, loaded)) and time.monotonic() < end:
            time.sleep(0.01)
        return not is_same


def test_the_run_that_is_ahead_samples_while_the_policy_is_updated():
    engine = Watching(seconds=60)
    overlap.step_seconds(SHORT, TINY, engine, 1, NUM_STEPS)
    assert engine.saw_an_update == [False] + [True] * (NUM_STEPS - 1)


def test_the_run_that_it_is_compared_with_does_not():
    engine = Watching(seconds=0.1)
    overlap.step_seconds(SHORT, TINY, engine, 0, NUM_STEPS)
    assert engine.saw_an_update == [False] * NUM_STEPS


def test_steps_that_warm_up_do_not_count():
    seconds = overlap.step_seconds(SHORT, TINY, overlap.waiting_engine(0.0), 0, NUM_STEPS)
    assert len(seconds) == NUM_STEPS - 1 - overlap.WARM_UP_STEPS  # of the first no begin is known
    assert min(seconds) > 0


def test_a_generation_takes_as_long_as_it_is_told_to():
    engine = overlap.waiting_engine(0.3)
    seconds = overlap.step_seconds(SHORT, TINY, engine, 0, NUM_STEPS)
    assert min(seconds) >= 0.3


def test_overlap_is_timed_beside_the_same_without():
    (figure,) = overlap.compare_overlap(TINY, EFFORT)
    assert (figure.figure, figure.against) == ("overlap", "the same with 0")
    assert figure.case == "generation and update equally long, max_head_offpolicyness 1"
    assert (figure.unit, figure.target) == ("s", 0.65)
    assert min(figure.ours, figure.other) > 0
    update = figure.details[""]["update (s)"]
    assert figure.other > update  # which the generation takes in addition
