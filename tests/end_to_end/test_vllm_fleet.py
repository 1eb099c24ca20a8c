"""Two real vLLM servers of one engine: sampling during updates, and the loss of one server."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from served_engines import assert_written_by, generate
from small_runs import fit, make_module
from tiny import prompt, tiny_policy, unbatched_logprobs
from vllm_environment import launch_on_cpu, needs_vllm
from vllm_servers import counter, processes_of
from vllm_settings import ARCHITECTURE
from worker_processes import is_alive, wait_until

from lit_grpo.rollout import Sampling, Supervision, VLLMServerEngine

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(1500)]

LONG = Sampling(max_tokens=200)
PROMPTS = [prompt(text, id=text) for text in ("1+1=", "a longer one: ", "x", "22+3=" * 20)]
MANY = PROMPTS * 4
NUM_STEPS = 4
PROMPTS_OF_STEPS = [
    [replace(one, id=f"{step}: {one.id}") for one in PROMPTS] for step in range(NUM_STEPS)
]
STARTING_SECONDS = 500


class SharedEngine(VLLMServerEngine):
    """Samples once both servers are ready, records when, and stays open after a training run."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.events = []
        self.may_end = lambda prompts: True

    def generate(self, prompts, *arguments, **settings):
        wait_until(lambda: all(server.is_ready for server in self.servers), STARTING_SECONDS)
        self.events.append("generation begins")
        yield from super().generate(prompts, *arguments, **settings)
        wait_until(lambda: self.may_end(prompts), STARTING_SECONDS)
        self.events.append("generation ends")

    def close(self):
        """Do nothing; `end` closes the engine."""

    def end(self):
        super().close()

    @property
    def servers(self):
        return self._supervisor.servers


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(architecture=ARCHITECTURE)


@pytest.fixture(scope="module")
def started(policy, tmp_path_factory):
    """An engine that is started once for all tests."""
    engine = SharedEngine(
        # So few sequences at a time that a server is not done before the test has acted on it.
        launch=launch_on_cpu(num_servers=2, flags={"max-num-seqs": 16}),
        directory=str(tmp_path_factory.mktemp("engine")),
        supervision=Supervision(health_interval=0.5, health_timeout=10, first_backoff=0.1),
    )
    try:
        engine.start(policy)
        yield engine
    finally:
        engine.end()


class RecordUpdates(L.Callback):
    """Keeps the model of every version, and records when updates begin and end.

    An update ends only once the next generation has begun, which ends only after the update:
    if one waited for the other, the test would fail.
    """

    def __init__(self, engine):
        self.events = engine.events
        self.models = {}
        engine.may_end = self._may_end

    def _may_end(self, prompts):
        """Return whether all updates before the step of the prompts have ended.

        The threads of two steps may begin in either order, so the prompts say which step it is.
        """
        return self._count("update ends") >= PROMPTS_OF_STEPS.index(list(prompts))

    def _count(self, event):
        return self.events.count(event)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.models[trainer.global_step] = copy.deepcopy(pl_module.policy.model)

    def on_stage_start(self, trainer, pl_module, name):
        if name == "update":
            self.events.append("update begins")

    def on_stage_end(self, trainer, pl_module, stage):
        if stage.name == "update":
            num_begun = min(self._count("update begins") + 1, NUM_STEPS)
            wait_until(lambda: self._count("generation begins") >= num_begun)
            self.events.append("update ends")


@pytest.fixture
def asynchronous(started):
    """A training run that samples the next step while the policy is updated.

    It is the first with the engine, since versions of weights only grow.
    """
    recorder = RecordUpdates(started)
    module = make_module(
        policy={"architecture": ARCHITECTURE},
        engine=started,
        sampling=LONG,
        max_head_offpolicyness=1,
    )
    prompts = [*chain.from_iterable(PROMPTS_OF_STEPS)]
    try:
        outputs = fit(
            module, callbacks=[recorder], prompts=prompts, shuffle=False, max_steps=NUM_STEPS
        )
    finally:
        started.may_end = lambda prompts: True
    return SimpleNamespace(outputs=outputs, models=recorder.models, events=list(started.events))


def test_a_training_samples_one_step_ahead(asynchronous):
    run = asynchronous
    assert len(run.outputs) == NUM_STEPS
    assert_versions_are_those_that_sampled_each_token(run)
    assert_differences_are_those_of_the_older_weights(run)
    assert_updates_overlap_the_next_generation(run.events)


def assert_versions_are_those_that_sampled_each_token(run):
    # Whether a completion spans an update depends on the machine; a test of
    # rollout/vllm/test_server_with_vllm.py forces one to.
    ages = []
    for step, output in enumerate(run.outputs):
        rollouts = output["rollouts"]
        assert rollouts.valid.all()
        prompts = [group.prompt for group in rollouts.groups]
        assert_written_by(run.models, prompts, rollouts.completions)
        versions = [set(completion.policy_versions) for completion in rollouts.completions]
        ages.append({step - version for one in versions for version in one})
        assert output["metrics"]["rollout/head_offpolicyness_max"] == max(ages[-1])
        assert output["metrics"]["rollout/stale_fraction"] == 0
    assert ages[0] == {0}
    assert set().union(*ages) == {0, 1}


def assert_differences_are_those_of_the_older_weights(run):
    for step, output in enumerate(run.outputs):
        batch, metrics = output["batch"], output["metrics"]
        differences = torch.cat(
            [difference(run.models[step], batch, row) for row in range(batch.num_rows)]
        )
        for name, value in (("mean", differences.mean()), ("max", differences.max())):
            logged = metrics[f"sampler/logprob_difference_{name}"]
            assert logged == pytest.approx(value.item(), rel=0.01, abs=1e-5)
    largest = [one["metrics"]["sampler/logprob_difference_max"] for one in run.outputs]
    assert largest[0] < 1e-4
    assert max(largest) > 1e-2


@torch.no_grad()
def difference(model, batch, row):
    """Return the differences of the logprobs of a row; none if it is not trained on."""
    ours, _ = unbatched_logprobs(model, batch, row)
    theirs = batch.sampler_logprobs[row][batch.completion_mask[row]]
    return (ours - theirs).abs()[: len(theirs) if batch.advantages[row] else 0]


def assert_updates_overlap_the_next_generation(events):
    """Check that the next generation begins before each update ends, and ends after it."""
    places = {kind: [n for n, one in enumerate(events) if one == kind] for kind in set(events)}
    assert {kind: len(found) for kind, found in places.items()} == dict.fromkeys(
        ("generation begins", "generation ends", "update begins", "update ends"), NUM_STEPS
    )
    for step in range(NUM_STEPS - 1):
        assert places["generation begins"][step + 1] < places["update ends"][step]
        assert places["update ends"][step] < places["generation ends"][step + 1]


@pytest.fixture
def engine(policy, started):
    """The engine with the weights of a policy, under a version beyond that of the training."""
    started.load_weights(policy, started.version + 1)
    started.observe()
    return started


def test_the_other_server_takes_over_and_the_killed_one_is_restarted_and_checked(policy, engine):
    urls = [server.url for server in engine.servers]
    processes = processes_of(urls[0])
    for process in processes:
        process.suspend()  # so that it is not done before what it has sent is read here
    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(generate, engine, MANY, LONG, group_size=8)
        wait_until(lambda: engine.servers[0].load.num_running)
        processes[0].kill()
        for process in processes[1:]:
            process.resume()
        completions = sampling.result(STARTING_SECONDS)
    assert_written_by({engine.version: policy.model}, MANY, completions)
    wait_until(lambda: engine._supervisor.num_restarts)
    wait_until(lambda: all(server.is_ready for server in engine.servers), STARTING_SECONDS)
    assert not any(is_alive(process.pid) for process in processes)
    observed = engine.observe()
    assert observed.totals["rollout/restarts"] == 1
    assert observed.totals["rollout/retries"] >= 1
    assert observed.means["rollout/ready_fraction"] == [1.0, 1.0]
    (difference,) = observed.means["sampler/weight_check_difference"]  # of the one that came back
    assert difference < 1e-4
    assert_both_serve(policy, engine)


def num_generated(urls):
    """Return the number of tokens that each server has sampled since it was started."""
    return [counter(url, "generation_tokens_total") for url in urls]


def assert_both_serve(policy, engine):
    urls = [server.url for server in engine.servers]
    before = num_generated(urls)
    completions = generate(engine, PROMPTS, LONG, seed=1)
    assert_written_by({engine.version: policy.model}, PROMPTS, completions)
    after = num_generated(urls)
    shares = [now - then for now, then in zip(after, before, strict=True)]
    assert min(shares) > 0
    assert sum(shares) == sum(len(one.token_ids) for one in completions)
    assert engine.observe().totals == {"rollout/restarts": 0, "rollout/retries": 0}
