import threading
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from tiny import completion, prompt

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.objective import AdvantageConfig
from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.rollout import EngineFailed, RolloutEngine, Sampling
from lit_grpo.stopping import ExitCode
from lit_grpo.training.collecting.collector import Collector
from lit_grpo.training.collecting.prefetch import StepContext
from lit_grpo.training.collecting.score_gate import OutagePolicy
from lit_grpo.training.metrics import Metrics
from lit_grpo.training.seeds import Seeds
from lit_grpo.training.stages import StageEvents
from lit_grpo.training.waiting import StepAbandoned
from lit_grpo.types import Measurements

PROMPTS = [prompt(id="a"), prompt(id="b")]
POLICY = object()


class RecordingEngine(RolloutEngine):
    """Samples fixed completions and records what it is asked for."""

    def __init__(self):
        self.calls = []

    def load_weights(self, policy, version):
        self.version = version
        self.calls.append(("load_weights", policy, version))

    def generate(self, prompts, group_size, sampling, *, seed):
        self.calls.append(("generate", [one.id for one in prompts], seed))
        for row in range(len(prompts) * group_size):
            yield row, completion([row] * (1 + row))

    def observe(self):
        return Measurements(totals={"rollout/retries": 3.0})


class Length(Reward):
    def score(self, prompt, completion):
        return float(len(completion.token_ids))


class RecordStages(L.Callback):
    def __init__(self):
        self.stages = []

    def on_stage_end(self, trainer, pl_module, stage):
        self.stages.append(stage)


def collect(engine, *, reward=None, step=0, version=0, callbacks=(), metrics=None):
    trainer = SimpleNamespace(callbacks=callbacks, should_stop=False)
    events = StageEvents(SimpleNamespace(trainer=trainer, device=torch.device("cpu")))
    position = StepContext(
        number=step,
        policy_version=version,
        max_policy_version=None,
        seeds=Seeds(0, 0),
        loader=PromptLoader(PROMPTS, 2),
    )
    with RewardSuite([reward or Length()]) as rewards:
        collector = Collector(
            events,
            POLICY,
            engine,
            rewards,
            sampling=Sampling(),
            group_size=2,
            advantage=AdvantageConfig(),
            outage=OutagePolicy(),
            max_head_offpolicyness=0,
            optimizer_steps=1,
            max_refill_rounds=0,
        )
        collector.load_weights(position)
        return collector.collect(PROMPTS, position, metrics or Metrics())


def test_weights_are_synchronized_before_prompts_are_sampled_and_scored():
    engine, metrics = RecordingEngine(), Metrics()
    rollouts = collect(engine, version=7, metrics=metrics)
    load, generate = engine.calls
    assert load == ("load_weights", POLICY, 7)
    assert generate[:2] == ("generate", ["a", "b"])
    assert rollouts.rewards.tolist() == [[1, 2], [3, 4]]
    assert [group.prompt.id for group in rollouts.groups] == ["a", "b"]
    values = metrics.merged()
    assert values["reward/mean"] == 2.5
    assert values["rollout/retries"] == 3


def test_a_step_has_a_seed_of_its_own_that_is_the_same_when_it_is_repeated():
    engine = RecordingEngine()
    for step in (0, 1, 1):
        collect(engine, step=step)
    first, second, repeated = (call[2] for call in engine.calls if call[0] == "generate")
    assert first != second == repeated


def test_completions_are_scored_while_others_are_sampled():
    is_scored = threading.Event()

    class SetsEvent(Length):
        def score(self, prompt, completion):
            is_scored.set()
            return super().score(prompt, completion)

    class WaitsForScore(RecordingEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            for row, one in super().generate(prompts, group_size, sampling, seed=seed):
                assert row == 0 or is_scored.wait(60)
                yield row, one

    assert collect(WaitsForScore(), reward=SetsEvent()).valid.all()


def test_the_stages_of_a_step_are_reported_with_the_rewards():
    recorder = RecordStages()
    collect(RecordingEngine(), callbacks=[recorder])
    assert [stage.name for stage in recorder.stages] == ["weight_sync", "generation", "reward"]
    details = recorder.stages[-1].details
    assert details["reward_mean"] == 2.5
    assert details["reward_std"] == pytest.approx(0.5**0.5)  # in each group


@pytest.mark.parametrize(
    ("error", "said", "exit_code"),
    [
        (EngineFailed("no server is left"), "no server is left", ExitCode.ENGINE_FAILED),
        (KeyError("cache"), r"\S+ \(\S+test_collector.py:\d+\) failed:", ExitCode.CRASHED),
    ],
)
@pytest.mark.parametrize("method", ["load_weights", "generate"])
def test_an_engine_that_gives_up_or_has_a_bug_abandons_the_step(method, error, said, exit_code):
    def fail(*args, **settings):
        raise error

    engine = RecordingEngine()
    setattr(engine, method, fail)
    with pytest.raises(StepAbandoned, match=f"Stopped: {said}") as stopped:
        collect(engine)
    assert stopped.value.reason.exit_code == exit_code
    assert stopped.value.reason.is_step_unfinished
