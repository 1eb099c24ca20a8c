"""Rollout steps that are sampled while the policy is updated: their age, their order, their end."""

import copy
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import PROMPTS, Keep, fit, make_module, make_trainer, weights
from tiny import prompt

from lit_grpo.data import PromptLoader
from lit_grpo.rollout import EngineFailed, HFEngine, RolloutEngine
from lit_grpo.stopping import get_stop_reason, stop_run
from lit_grpo.training.metrics import Metrics
from lit_grpo.training.prefetch import drop_stale_groups
from lit_grpo.types import StopReason


class AsideEngine(RolloutEngine):
    """Samples with a copy of the policy's weights, as a server would; keeps a diary."""

    overlaps_updates = True

    def __init__(self):
        self.diary = []
        self._sampler = HFEngine()

    def load_weights(self, policy, version):
        if version == self.version:
            return
        model = copy.deepcopy(policy.model)
        aside = SimpleNamespace(model=model, tokenizer=policy.tokenizer, source=None)
        self._sampler = HFEngine()
        self._sampler.load_weights(aside, version)
        self.version = version
        self.diary.append(("weights", version))

    def generate(self, prompts, group_size, sampling, *, seed):
        self.diary.append(("generate", self.version))
        yield from self._sampler.generate(prompts, group_size, sampling, seed=seed)


class LateEngine(AsideEngine):
    """Without any overlap: samples with the weights before the last ones, and keeps quiet about
    it, or its groups would be stale."""

    overlaps_updates = False

    def load_weights(self, policy, version):
        before = self._sampler
        super().load_weights(policy, version)
        self.late = before if version else self._sampler

    def generate(self, prompts, group_size, sampling, *, seed):
        for row, one in self.late.generate(prompts, group_size, sampling, seed=seed):
            yield row, _written_by(self.version, one)


def run(engine, num_ahead, *, max_steps=4, **settings):
    module = make_module(engine=engine, max_head_offpolicyness=num_ahead, **settings)
    outputs = fit(module, max_steps=max_steps)
    return module, outputs


def ages(outputs):
    """[steps] the ages of all tokens that were trained on, in optimizer steps."""
    return [
        {step - version for c in output["rollouts"].completions for version in c.policy_versions}
        for step, output in enumerate(outputs)
    ]


class BoundEngine(AsideEngine):
    """The same, but nothing may be sampled during an update."""

    overlaps_updates = False

    def generate(self, prompts, group_size, sampling, *, seed):
        assert threading.current_thread() is threading.main_thread()
        yield from super().generate(prompts, group_size, sampling, seed=seed)


def test_without_leave_to_be_ahead_it_is_the_synchronous_run_bit_for_bit():
    bound, first = run(BoundEngine(), 0)
    aside, second = run(AsideEngine(), 0)
    for name, value in weights(bound).items():
        assert torch.equal(value, weights(aside)[name]), name
    assert [o["rollouts"].completions for o in first] == [o["rollouts"].completions for o in second]


def test_one_ahead_trains_on_what_the_weights_before_wrote():
    engine = AsideEngine()
    _, outputs = run(engine, 1)
    assert ages(outputs) == [{0}, {1}, {1}, {1}]
    assert [output["metrics"]["rollout/head_offpolicyness_max"] for output in outputs] == [
        0,
        1,
        1,
        1,
    ]
    assert outputs[3]["metrics"]["rollout/head_offpolicyness_mean"] == 1
    assert outputs[3]["metrics"]["rollout/stale_fraction"] == 0


def test_one_ahead_is_bit_for_bit_a_run_that_samples_late():
    ahead, _ = run(AsideEngine(), 1)
    late, _ = run(LateEngine(), 0)
    for name, value in weights(late).items():
        assert torch.equal(value, weights(ahead)[name]), name


def test_two_ahead_are_at_most_two_old():
    _, outputs = run(AsideEngine(), 2, max_steps=5)
    assert ages(outputs) == [{0}, {1}, {2}, {2}, {2}]


def test_several_optimizer_steps_a_rollout_make_it_that_much_older():
    _, outputs = run(AsideEngine(), 2, update={"minibatches": 2}, max_steps=6)
    versions = [{v for c in o["rollouts"].completions for v in c.policy_versions} for o in outputs]
    assert versions == [{0}, {0}, {2}]  # trained on at versions 0, 2 and 4


def test_the_next_step_is_sampled_while_the_policy_is_updated():
    began, may_end = threading.Event(), threading.Event()

    class Waiting(AsideEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            if len([one for one in self.diary if one[0] == "generate"]) == 1:
                began.set()
                assert may_end.wait(60)  # the update of step 0 lets it go on
            yield from super().generate(prompts, group_size, sampling, seed=seed)

    module = make_module(engine=Waiting(), max_head_offpolicyness=1)
    update = module.update_policy

    def update_policy(batch, metrics):
        assert began.wait(60)
        update(batch, metrics)
        may_end.set()

    module.update_policy = update_policy
    assert len(fit(module, max_steps=2)) == 2


def test_the_prompts_are_those_of_the_synchronous_run_over_epochs():
    prompts = [prompt(f"{n}+1=", id=str(n)) for n in range(10)]  # an epoch has 2 batches of 4
    ids = []
    for engine, num_ahead in ((HFEngine(), 0), (AsideEngine(), 2)):
        module = make_module(engine=engine, max_head_offpolicyness=num_ahead)
        outputs = fit(module, prompts=prompts, max_steps=5)
        ids.append([[group.prompt.id for group in o["rollouts"].groups] for o in outputs])
    assert ids[0] == ids[1]


def test_nothing_is_sampled_beyond_the_end():
    engine = AsideEngine()
    run(engine, 2, max_steps=3)
    assert len([one for one in engine.diary if one[0] == "generate"]) == 3


def test_groups_with_a_token_that_is_too_old_are_dropped_and_counted():
    _, (output,) = run(AsideEngine(), 0, max_steps=1)
    rollouts, metrics = output["rollouts"], Metrics()
    groups = [
        replace(one, completions=tuple(_written_by(4, c) for c in one.completions))
        for one in rollouts.groups
    ]
    mixed = list(groups[1].completions)
    mixed[2] = replace(mixed[2], policy_versions=(3, *mixed[2].policy_versions[1:]))
    groups[1] = replace(groups[1], completions=tuple(mixed))
    rollouts = replace(rollouts, groups=tuple(groups))
    fresh = drop_stale_groups(rollouts, 5, 1, metrics)
    assert fresh.valid.all(1).tolist() == [True, False, True, True]
    assert not fresh.valid[1].any()
    assert fresh.rewards[1].isnan().all()
    assert metrics.merged()["rollout/stale_fraction"] == 1 / 4
    assert rollouts.valid.all()  # the batch that was given is as it was


def _written_by(version, completion):
    return replace(completion, policy_versions=(version,) * len(completion.token_ids))


def test_a_token_as_old_as_allowed_is_not_stale():
    _, (output,) = run(AsideEngine(), 0, max_steps=1)
    fresh = drop_stale_groups(output["rollouts"], 2, 2, Metrics())
    assert fresh is output["rollouts"]


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_an_engine_that_gives_up_ends_the_run_before_the_step(num_ahead):
    class Dying(AsideEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            if len([one for one in self.diary if one[0] == "generate"]) == 2:
                raise EngineFailed("no server is left: Aborted (core dumped)")
            yield from super().generate(prompts, group_size, sampling, seed=seed)

    module = make_module(engine=Dying(), max_head_offpolicyness=num_ahead)
    keep, trainer = Keep(), make_trainer(max_steps=5)
    trainer.callbacks.append(keep)
    trainer.fit(module, PromptLoader(PROMPTS, 4))
    reason = get_stop_reason(trainer)
    assert reason.exit_code == 5
    assert "no server is left: Aborted (core dumped)" in reason.message
    assert reason.is_step_unfinished
    assert trainer.global_step == module.rollout_step == 2
    assert trainer.train_dataloader.state_dict() == {"epoch": 2, "position": 0}


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_run_may_be_ended_while_completions_are_waited_for(num_ahead):
    is_heard, may_go_on = threading.Event(), threading.Event()

    class Slow(AsideEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            samples = super().generate(prompts, group_size, sampling, seed=seed)
            is_third = len([one for one in self.diary if one[0] == "generate"]) == 2
            try:
                for number, sample in enumerate(samples):
                    if is_third and number == 1:
                        may_go_on.wait(60)
                    yield sample
            except GeneratorExit:
                is_heard.set()
                raise

    class Ends(Callback):
        def on_wait(self, trainer, pl_module, _):
            message = "ended while it waited"
            stop_run(trainer, StopReason(exit_code=1, message=message, is_step_unfinished=True))

    module = make_module(engine=Slow(), max_head_offpolicyness=num_ahead)
    trainer = make_trainer(max_steps=5)
    trainer.callbacks.append(Ends())
    trainer.fit(module, PromptLoader(PROMPTS, 4))
    assert get_stop_reason(trainer).message == "ended while it waited"
    assert trainer.global_step == module.rollout_step == 2
    assert trainer.train_dataloader.state_dict() == {"epoch": 2, "position": 0}
    may_go_on.set()
    assert is_heard.wait(60)  # what was asked for is broken off


def test_a_defect_of_an_engine_is_not_swallowed_by_its_thread():
    class Broken(AsideEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            raise ZeroDivisionError("in the engine")
            yield

    with pytest.raises(ZeroDivisionError, match="in the engine"):
        run(Broken(), 1)


REFUSED = {
    "an engine of the trainer's own weights": ({"engine": HFEngine(), "ahead": 1}, "HFEngine"),
    "fewer than one update makes": ({"update": {"epochs": 2}, "ahead": 1}, "epochs .* = 2, got 1"),
    "less than none": ({"ahead": -1}, "got -1"),
    "replaced groups": ({"dynamic_sampling_rounds": 1, "ahead": 1}, "got 1 and 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_ahead_is_refused(case):
    settings, message = REFUSED[case]
    ahead = settings["ahead"]
    settings = {"engine": AsideEngine()} | {k: v for k, v in settings.items() if k != "ahead"}
    with pytest.raises(ValueError, match=message):
        make_module(max_head_offpolicyness=ahead, **settings)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("epoch_limit", [1.0, 2])
def test_a_peek_is_what_the_loader_hands_out_later_and_takes_nothing(rank, epoch_limit):
    prompts = [prompt(f"{n}=", id=str(n)) for n in range(14)]

    def loader():
        return PromptLoader(prompts, 4, seed=3, rank=rank, world_size=2, epoch_limit=epoch_limit)

    peeking, plain, given, expected = loader(), loader(), [], []
    for _ in range(3):
        for batch in peeking:
            ahead = [peeking.peek(number) for number in (1, 2, 5)]
            state = peeking.state_dict()
            given.append((batch, ahead))
            assert peeking.state_dict() == state
        expected += list(plain)
    batches = [batch for batch, _ in given]
    assert batches == expected
    for number, (_, ahead) in enumerate(given[:-5]):
        assert ahead == [batches[number + further] for further in (1, 2, 5)]
    peeking.rewind()
    assert next(iter(peeking)) == batches[-1]
