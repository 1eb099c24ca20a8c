"""Rollouts that are sampled during an update: their age, their order, and how they end."""

import threading
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from overlapping import OverlappingEngine
from small_runs import PROMPTS, fit, make_module, make_trainer, weights
from tiny import completion, prompt, rollouts

from lit_grpo.callbacks import ZeroRewardBreaker
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.rollout import EngineFailed, HFEngine
from lit_grpo.stopping import get_stop_reason, stop_run
from lit_grpo.training import waiting
from lit_grpo.training.collecting.prefetch import drop_stale_groups
from lit_grpo.training.metrics import Metrics
from lit_grpo.types import StopReason


class LateEngine(OverlappingEngine):
    """Samples without overlap, but with the weights of the step before.

    It reports the current version all the same, since its groups would be stale otherwise.
    """

    overlaps_updates = False

    def load_weights(self, policy, version):
        before = self._sampler
        super().load_weights(policy, version)
        self.late = before if version else self._sampler

    def generate(self, prompts, group_size, sampling, *, seed):
        for row, one in self.late.generate(prompts, group_size, sampling, seed=seed):
            yield row, with_version(self.version, one)


def with_version(version, completion):
    return replace(completion, policy_versions=(version,) * len(completion.token_ids))


def run(engine, num_ahead, *, max_steps=4, **settings):
    module = make_module(engine=engine, max_head_offpolicyness=num_ahead, **settings)
    outputs = fit(module, max_steps=max_steps)
    return module, outputs


def versions(outputs):
    """Return, for each step, the versions that sampled the tokens that were trained on."""
    return [
        {version for c in output["rollouts"].completions for version in c.policy_versions}
        for output in outputs
    ]


class MainThreadEngine(OverlappingEngine):
    """Checks that nothing is sampled during an update."""

    overlaps_updates = False

    def generate(self, prompts, group_size, sampling, *, seed):
        assert threading.current_thread() is threading.main_thread()
        yield from super().generate(prompts, group_size, sampling, seed=seed)


def test_without_steps_ahead_an_overlapping_engine_makes_the_synchronous_run():
    synchronous, first = run(MainThreadEngine(), 0, max_steps=2)
    overlapping, second = run(OverlappingEngine(), 0, max_steps=2)
    torch.testing.assert_close(weights(synchronous), weights(overlapping), rtol=0, atol=0)
    assert [o["rollouts"].completions for o in first] == [o["rollouts"].completions for o in second]


def test_one_step_ahead_is_bit_identical_to_a_run_that_samples_with_the_weights_before():
    ahead, outputs = run(OverlappingEngine(), 1)
    late, _ = run(LateEngine(), 0)
    torch.testing.assert_close(weights(ahead), weights(late), rtol=0, atol=0)
    assert versions(outputs) == [{0}, {0}, {1}, {2}]
    oldest = [output["metrics"]["rollout/head_offpolicyness_max"] for output in outputs]
    assert oldest == [0, 1, 1, 1]
    assert outputs[3]["metrics"]["rollout/head_offpolicyness_mean"] == 1
    assert outputs[3]["metrics"]["rollout/stale_fraction"] == 0


def test_two_steps_ahead_are_at_most_two_optimizer_steps_old_and_end_with_the_run():
    engine = OverlappingEngine()
    _, outputs = run(engine, 2, max_steps=4)
    assert versions(outputs) == [{0}, {0}, {0}, {1}]
    assert engine.num_generations == 4  # nothing is sampled for steps after the last one


def test_a_step_ahead_is_as_old_as_the_optimizer_steps_of_one_rollout_step():
    _, outputs = run(OverlappingEngine(), 2, update={"minibatches": 2}, max_steps=6)
    assert versions(outputs) == [{0}, {0}, {2}]  # trained on at versions 0, 2 and 4


def test_the_next_step_is_sampled_while_the_policy_is_updated():
    began, may_end = threading.Event(), threading.Event()

    class WaitingEngine(OverlappingEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            if self.num_generations == 1:
                began.set()
                assert may_end.wait(60)  # until the update of step 0 has ended
            yield from super().generate(prompts, group_size, sampling, seed=seed)

    module = make_module(engine=WaitingEngine(), max_head_offpolicyness=1)
    update = module.take_optimizer_steps

    def take_optimizer_steps(batch, metrics):
        assert began.wait(60)
        update(batch, metrics)
        may_end.set()

    module.take_optimizer_steps = take_optimizer_steps
    assert len(fit(module, max_steps=2)) == 2


def test_the_prompts_are_those_of_the_synchronous_run_over_epochs():
    prompts = [prompt(f"{n}+1=", id=str(n)) for n in range(10)]  # an epoch has 2 batches of 4
    ids = []
    for engine, num_ahead in ((HFEngine(), 0), (OverlappingEngine(), 2)):
        module = make_module(engine=engine, max_head_offpolicyness=num_ahead)
        outputs = fit(module, prompts=prompts, max_steps=4)
        ids.append([[group.prompt.id for group in o["rollouts"].groups] for o in outputs])
    assert ids[0] == ids[1]


def test_groups_with_a_token_that_is_too_old_are_excluded_and_counted():
    mixed = replace(completion([1, 2]), policy_versions=(3, 4))
    current = with_version(4, completion([1, 2]))
    batch = rollouts([[0, 1], [0, 1]], [[current, current], [current, mixed]])
    metrics = Metrics()
    fresh = drop_stale_groups(batch, 5, 1, metrics)
    assert fresh.valid.tolist() == [[True, True], [False, False]]
    assert fresh.rewards[1].isnan().all()
    assert metrics.merged() == {
        "rollout/head_offpolicyness_mean": 5 / 4,
        "rollout/head_offpolicyness_max": 2,
        "rollout/stale_fraction": 1 / 2,
    }
    assert batch.valid.all()  # the input is not changed
    assert drop_stale_groups(batch, 5, 2, Metrics()) is batch


def test_the_first_step_with_dropped_groups_is_warned_of_and_only_that(caplog):
    class ForgetsOne(HFEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            for row, one in super().generate(prompts, group_size, sampling, seed=seed):
                yield row, with_version(0, one) if row == 0 else one

    outputs = fit(make_module(engine=ForgetsOne()), max_steps=3)
    dropped = [one["metrics"]["rollout/stale_fraction"] for one in outputs]
    (said,) = (one for one in caplog.messages if "groups were dropped" in one)
    assert dropped == [0, 1 / 4, 1 / 4]
    assert said.startswith("rollout step 2: 25% of the groups were dropped: by the policy_versions")
    assert "raise model.max_head_offpolicyness. This warning comes once" in said


def test_an_engine_that_reports_old_versions_is_told_so_when_its_groups_stop_the_run():
    class Forgets(HFEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            for row, one in super().generate(prompts, group_size, sampling, seed=seed):
                yield row, with_version(0, one)

    trainer = make_trainer(ZeroRewardBreaker(2, stop_after=3), max_steps=5)
    trainer.fit(make_module(engine=Forgets()), PromptLoader(PROMPTS, 4))
    reason = get_stop_reason(trainer)
    assert trainer.global_step == 1
    assert (reason.exit_code, reason.cause) == (3, "stale_rollouts")
    assert "3 rollout steps in a row, since rollout step 2" in reason.message
    assert "100% of the groups were dropped: by the policy_versions" in reason.message


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_an_engine_that_gives_up_ends_the_run_before_the_step(num_ahead):
    class Failing(OverlappingEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            if self.num_generations == 2:
                raise EngineFailed("no server is left: Aborted (core dumped)")
            yield from super().generate(prompts, group_size, sampling, seed=seed)

    module = make_module(engine=Failing(), max_head_offpolicyness=num_ahead)
    trainer = make_trainer(max_steps=5)
    trainer.fit(module, PromptLoader(PROMPTS, 4))
    reason = get_stop_reason(trainer)
    assert reason.exit_code == 5
    assert "no server is left: Aborted (core dumped)" in reason.message
    assert reason.is_step_unfinished
    assert trainer.global_step == module.rollout_step == 2
    assert trainer.train_dataloader.state_dict() == {"batches": 2, "epoch": 2, "position": 0}


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_callback_may_end_the_run_while_it_waits_for_completions(num_ahead, monkeypatch):
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.01)
    is_closed, may_go_on = threading.Event(), threading.Event()

    class Slow(OverlappingEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            is_third = self.num_generations == 2
            samples = super().generate(prompts, group_size, sampling, seed=seed)
            try:
                for number, sample in enumerate(samples):
                    if is_third and number == 1:
                        may_go_on.wait(60)
                    yield sample
            except GeneratorExit:
                is_closed.set()
                raise

    class Stops(Callback):
        def on_wait(self, trainer, pl_module, _):
            if pl_module.rollout_step == 2:
                message = "ended while it waited"
                stop_run(trainer, StopReason(exit_code=1, message=message, is_step_unfinished=True))

    module = make_module(engine=Slow(), max_head_offpolicyness=num_ahead)
    trainer = make_trainer(Stops(), max_steps=5)
    trainer.fit(module, PromptLoader(PROMPTS, 4))
    assert get_stop_reason(trainer).message == "ended while it waited"
    assert trainer.global_step == module.rollout_step == 2
    assert trainer.train_dataloader.state_dict() == {"batches": 2, "epoch": 2, "position": 0}
    may_go_on.set()
    assert is_closed.wait(60)  # the engine is told that nothing more is needed


def test_an_exception_in_the_thread_of_an_engine_ends_the_run(monkeypatch):
    class Broken(OverlappingEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            raise ZeroDivisionError("in the engine")
            yield

    module, _ = run(Broken(), 1)
    reason = get_stop_reason(module.trainer)
    assert reason.exit_code == 1
    assert reason.message.endswith("ZeroDivisionError: in the engine")
    monkeypatch.setattr(Broken, "__module__", "lit_grpo.rollout")  # no code of the user's
    with pytest.raises(ZeroDivisionError, match="in the engine"):
        run(Broken(), 1)
