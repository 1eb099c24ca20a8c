"""What `HealthMonitor` does about what it finds, in real runs."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import fit, make_module, weights
from toy_rollouts import completion, outputs, rollouts, train_batch
from toy_rollouts import fit as fit_toy

from lit_grpo.callbacks import Checkpoints, HealthMonitor, Rule
from lit_grpo.objective import KLTerm, Objective
from lit_grpo.rewards import FunctionReward
from lit_grpo.rollout import Sampling
from lit_grpo.runs.files.events import EventsFile, read_events
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.types import UserError
from lit_grpo.types.errors import Diverged

CUT = outputs(
    rollouts([[0.0, 1.0]], [completion("a", "length"), completion("b", "length")]),
    train_batch([-1.0, 1.0]),
)
HEALTHY = outputs(rollouts([[0.0, 1.0]]), train_batch([-1.0, 1.0]))


class SpoilWeights(Callback):
    """Set a weight to NaN after some rollout steps, and keep what the weights were before."""

    def __init__(self, *numbers):
        self.numbers = numbers
        self.before = {}

    def on_train_batch_end(self, trainer, module, *args):
        self.before[module.rollout_step] = weights(module)
        if module.rollout_step in self.numbers:
            next(iter(module.policy.trainable_parameters())).data.view(-1)[0] = math.nan


class SpoilGradients(Callback):
    """Make the gradients of some rollout steps NaN."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def on_train_start(self, trainer, module):
        parameter = next(iter(module.policy.trainable_parameters()))
        self.handle = parameter.register_hook(lambda grad: self.spoil(grad, module.rollout_step))

    def on_train_end(self, trainer, module):
        self.handle.remove()

    def spoil(self, gradient, number):
        return gradient * math.nan if number in self.numbers else gradient


class FirstWeights(Callback):
    """Keep the weights that each rollout step starts with."""

    def __init__(self):
        self.weights = {}

    def on_train_batch_start(self, trainer, module, *args):
        self.weights[module.rollout_step] = weights(module)


def adam(params):
    return torch.optim.Adam(params, lr=1e-3)


def train(tmp_path, *callbacks, steps=8, monitor=None, **settings):
    """Train with a checkpoint after every step; return the module and its grave events."""
    saving = Checkpoints(dirpath=str(tmp_path / "checkpoints"), every_n_steps=1, keep_last=9)
    module = make_module(**({"optimizer": adam} | settings))
    watching = [monitor or HealthMonitor(), saving, EventsFile(tmp_path)]
    fit(module, callbacks=[*callbacks, *watching], max_steps=steps)
    return module, [
        event for event in read_events(tmp_path) if event.kind not in ("start", "warning")
    ]


def assert_equal(one, other):
    assert all(weight.equal(other[name]) for name, weight in one.items())


def test_weights_that_are_not_finite_roll_the_run_back(tmp_path):
    spoil, first = SpoilWeights(4), FirstWeights()
    module, (rollback, done) = train(tmp_path, spoil, first)
    assert get_stop_reason(module.trainer) is None
    assert module.global_step == 8  # counted on
    # The 4th step is bad. Its rollouts were sampled with the weights after the 3rd, so that the
    # checkpoint from after the 2nd is taken.
    assert_equal(first.weights[4], spoil.before[2])
    assert all(weight.isfinite().all() for weight in weights(module).values())
    assert (rollback.kind, rollback.step, rollback.cause) == ("rollback", 4, "not_finite_weights")
    assert "Rolled back to step_000002.ckpt, 1 of at most 2 times" in rollback.message
    assert (done.kind, done.step) == ("done", 8)


@pytest.mark.slow
def test_a_rollback_restores_the_moments_and_keeps_the_present_settings(tmp_path):
    class Watch(Callback):
        def __init__(self):
            self.moments, self.rates = {}, {}

        def on_train_batch_start(self, trainer, module, *args):
            (optimizer,) = trainer.optimizers
            states = optimizer.state.values()
            self.moments[module.rollout_step] = [one["exp_avg"].clone() for one in states]
            self.rates[module.rollout_step] = optimizer.param_groups[0]["lr"]

    watch = Watch()
    train(tmp_path, SpoilWeights(4), watch, lr_schedule="linear")
    pairs = list(zip(watch.moments[2], watch.moments[4], strict=True))
    assert all(one.equal(other) for one, other in pairs)
    assert len(pairs) > 5
    assert watch.rates[4] == pytest.approx(1e-3 * 4 / 8)


@pytest.mark.slow
def test_too_many_skipped_steps_roll_the_run_back_and_the_data_goes_on(tmp_path, caplog):
    settings = {"update": {"max_skipped_steps": 2}}
    module, (rollback, done) = train(tmp_path, SpoilGradients(3, 4), steps=6, **settings)
    warnings = [one for one in read_events(tmp_path) if one.cause == "not_finite_gradient"][:2]
    for number, warning in enumerate(warnings, 1):
        assert (warning.kind, warning.step) == ("warning", 2 + number)
        skipped = "so the optimizer step is skipped"
        assert f"{skipped}: {number} in a row, of at most 2" in warning.message
    assert rollback.cause == "not_finite_gradient"
    assert rollback.message.startswith("2 optimizer steps in a row were skipped")
    assert done.step == 8  # rollout steps: two took no optimizer step
    assert (module.global_step, module.policy_version) == (6, 7)
    plain, _ = train(tmp_path / "plain", steps=8)
    assert module.loader.state_dict() == plain.loader.state_dict()


@pytest.mark.slow
def test_a_run_that_was_rolled_back_too_often_stops(tmp_path):
    spoil = SpoilWeights(3, 5, 7)
    module, events = train(tmp_path, spoil, monitor=HealthMonitor(max_rollbacks=2), steps=20)
    assert [event.kind for event in events] == ["rollback", "rollback", "stop"]
    reason = get_stop_reason(module.trainer)
    assert reason.exit_code == ExitCode.DIVERGED == 6
    assert reason.message.startswith("Stopped by HealthMonitor, not_finite_weights: Weights of")
    assert "it was rolled back 2 times already (max_rollbacks)" in reason.message


def test_without_a_healthy_checkpoint_the_run_stops(tmp_path):
    module = make_module()
    fit(module, callbacks=[SpoilWeights(1), HealthMonitor()], max_steps=5)
    reason = get_stop_reason(module.trainer)
    assert module.rollout_step == 1
    assert "there is no healthy checkpoint" in reason.message


@pytest.mark.slow
def test_a_run_resumed_after_a_rollback_goes_on_as_if_it_had_not_been_interrupted(tmp_path):
    whole, _ = train(tmp_path / "whole", SpoilWeights(4), steps=8)
    module, _ = train(tmp_path, SpoilWeights(4), steps=6)
    again = make_module(optimizer=adam)
    monitor = HealthMonitor()
    last = tmp_path / "checkpoints" / "last.ckpt"
    fit(again, callbacks=[monitor], max_steps=8, ckpt_path=last)
    assert again.num_rollbacks == 1
    assert_equal(weights(again), weights(whole))


def test_an_update_is_skipped_by_the_action_skip(tmp_path):
    rules = {"truncated": Rule(action="skip", patience=2)}
    module = make_module(sampling=Sampling(max_tokens=1))  # all are cut off
    before = {}

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, *args):
            before[module.rollout_step] = weights(module)
            trainer.should_stop = module.rollout_step == 3

    fit(module, callbacks=[HealthMonitor(rules), Watch()], max_steps=9)
    assert module.global_step == 1
    assert_equal(before[1], before[3])


def test_an_update_that_another_callback_skips_is_not_said_to_lack_tokens(caplog):
    class Skip(Callback):
        def on_rollouts(self, trainer, module, rollouts):
            return True

    rules = {"nothing_trained": Rule(action="warn", patience=1)}
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        fit(make_module(), callbacks=[HealthMonitor(rules), Skip()], max_steps=2, max_epochs=1)
    assert "No token contributes to the loss" not in caplog.text


@pytest.fixture
def run_toy(caplog, tmp_path):
    def run(monitor, steps):
        with caplog.at_level(logging.WARNING, logger="lit_grpo"):
            callbacks = [monitor, EventsFile(tmp_path)]
            trainer = fit_toy(lambda step: steps[step], callbacks, steps=len(steps))
        alerts = [event for event in read_events(tmp_path) if event.kind in ("alert", "warning")]
        return trainer, [record.getMessage() for record in caplog.records], alerts

    return run


def test_an_alert_is_a_warning_and_an_event(run_toy):
    monitor = HealthMonitor({"truncated": Rule(patience=2, action="alert")})
    _, (message,), (alert,) = run_toy(monitor, [CUT, HEALTHY, CUT, CUT, CUT])
    assert message.startswith("rollout step 4: 100% of the completions were cut off")
    assert (alert.kind, alert.step, alert.cause) == ("alert", 4, "truncated")
    assert alert.message in message


def test_a_warning_is_an_event_as_often_as_it_is_logged(run_toy):
    monitor = HealthMonitor({"truncated": Rule(patience=2)}, repeat_every=2)
    _, messages, events = run_toy(monitor, [HEALTHY, CUT, CUT, CUT, CUT])
    assert [(one.kind, one.step, one.cause) for one in events] == [
        ("warning", 3, "truncated"),
        ("warning", 4, "truncated"),
    ]
    assert len(messages) == 2


def test_a_cause_may_stop_the_run(run_toy):
    monitor = HealthMonitor({"truncated": Rule(patience=3, action="stop")})
    trainer, _, _ = run_toy(monitor, [CUT] * 9)
    reason = get_stop_reason(trainer)
    assert trainer.global_step == 3
    assert reason.exit_code == ExitCode.NO_REWARD
    assert reason.message.startswith(
        "Stopped by HealthMonitor, truncated (3 rollout steps in a row): 100% of the completions"
    )


def test_a_cause_may_be_ignored(run_toy):
    _, messages, _ = run_toy(HealthMonitor({"truncated": Rule(action="ignore")}), [CUT] * 3)
    assert messages == []


def test_the_streaks_and_the_past_are_resumed():
    monitor, again = (HealthMonitor({"truncated": Rule(patience=3)}) for _ in range(2))
    fit_toy(lambda step: CUT, [monitor], steps=2)
    again.load_state_dict(monitor.state_dict())
    assert again.state_dict() == monitor.state_dict()
    assert monitor.state_dict()["streaks"] == {"truncated": 2}
    assert len(monitor.state_dict()["past"]) == 2


def test_trouble_is_what_makes_a_checkpoint_unhealthy():
    empty = outputs(rollouts([[0.0, 1.0]], [completion("")] * 2), train_batch([-1.0, 1.0]))
    monitor = HealthMonitor({"identical_completions": Rule(action="ignore")})
    fit_toy(lambda step: CUT, [monitor], steps=1)
    assert monitor.trouble == ""
    fit_toy(lambda step: empty, [monitor], steps=1)
    assert monitor.trouble == "completions are empty"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rules": {"truncatd": Rule()}}, "Did you mean truncated?"),
        (
            {"rules": {"truncated": Rule(patience=0)}},
            "truncated.patience must be >= 1, got 0",
        ),
        (
            {"rules": {"kl_explosion": Rule(action="skip")}},
            "cannot skip an update because of kl_",
        ),
        ({"max_rollbacks": -1}, "max_rollbacks must be >= 0, got -1"),
        ({"repeat_every": 0}, "repeat_every must be >= 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(UserError) as caught:
        HealthMonitor(**settings)
    assert words in str(caught.value)


class NoiseInWeights(Callback):
    """Change all weights a lot after some rollout steps."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def on_train_batch_end(self, trainer, module, *args):
        if module.rollout_step in self.numbers:
            generator = torch.Generator().manual_seed(0)
            for one in module.policy.trainable_parameters():
                one.data += 3 * torch.randn(one.shape, generator=generator)


class Divergence(Callback):
    """Replace the KL divergence of each rollout step, numbered from 1."""

    def __init__(self, of_step):
        self.of_step = of_step

    def on_train_batch_end(self, trainer, module, outputs, *args):
        outputs["metrics"]["policy/kl"] = self.of_step(module.rollout_step, module.num_rollbacks)


EXPLODING = {
    "kl_explosion": Rule(action="roll_back", patience=1),
    "collapse": Rule(action="ignore"),
}


@pytest.mark.slow
def test_a_rollback_goes_to_before_the_trouble_began_though_it_was_noticed_later(tmp_path):
    """Ten steps must have passed before step 11 is compared; the trouble began with step 8."""
    divergence = Divergence(lambda step, num_rollbacks: 0.8 if 8 <= step <= 11 else 0.005)
    module, (rollback, done) = train(
        tmp_path, divergence, monitor=HealthMonitor(EXPLODING), steps=14
    )
    assert rollback.step == 11
    assert "Rolled back to step_000006.ckpt" in rollback.message  # 7 may be what sampled step 8
    assert done.kind == "done"


class EqualFrom(Callback):
    """Give completions equal rewards from a rollout step on, and different ones before it."""

    def __init__(self, first):
        self.first = first
        self.reward = FunctionReward(self.score, name="equal_from")

    def on_train_batch_start(self, trainer, module, *args):
        self.is_equal = module.rollout_step >= self.first

    def score(self, completions, **columns):
        return [0.5 if self.is_equal else float(number) for number, _ in enumerate(completions)]


@pytest.mark.slow
def test_each_rollback_for_the_same_trouble_goes_further_back(tmp_path):
    equal = EqualFrom(4)
    monitor = HealthMonitor({"equal_rewards": Rule(action="roll_back", patience=3)})
    _, events = train(tmp_path, equal, monitor=monitor, steps=20, rewards=[equal.reward])
    assert [(one.kind, one.step) for one in events] == [
        ("rollback", 7),
        ("rollback", 10),
        ("stop", 13),
    ]
    # The weights after step 4 have sampled the first equal rewards.
    assert "Rolled back to step_000003.ckpt" in events[0].message
    assert events[1].message.startswith("The rollback to step_000003.ckpt has not helped.")
    assert "Rolled back to step_000002.ckpt" in events[1].message
    assert "rolled back 2 times already" in events[2].message


def test_a_rollback_never_goes_into_the_trouble(tmp_path):
    equal = EqualFrom(0)
    monitor = HealthMonitor({"equal_rewards": Rule(action="roll_back", patience=2)})
    _, events = train(tmp_path, equal, monitor=monitor, steps=20, rewards=[equal.reward])
    assert [(one.kind, one.step) for one in events] == [("stop", 2)]
    assert "no healthy checkpoint from before step 0, when it began" in events[0].message


@pytest.mark.slow
def test_real_noise_in_the_weights_is_rolled_back_to_before_it(tmp_path):
    first = FirstWeights()
    settings = {"objective": Objective(kl=KLTerm(coef=0.01))}
    module, events = train(
        tmp_path,
        NoiseInWeights(7),
        first,
        monitor=HealthMonitor(EXPLODING),
        steps=14,
        **settings,
    )
    assert [one.kind for one in events] == ["rollback", "done"], events
    assert "Rolled back to step_000006.ckpt" in events[0].message
    assert_equal(first.weights[events[0].step], first.weights[6])


@pytest.mark.slow
def test_trouble_that_a_rollback_does_not_end_is_noticed_at_once_and_goes_further_back(tmp_path):
    divergence = Divergence(lambda step, num_rollbacks: 0.8 if step >= 12 else 0.005)
    monitor = HealthMonitor(EXPLODING)
    module, events = train(tmp_path, divergence, monitor=monitor, steps=30)
    assert [(one.kind, one.step) for one in events] == [
        ("rollback", 12),
        ("rollback", 13),
        ("stop", 14),
    ]
    assert "Rolled back to step_000010.ckpt" in events[0].message
    assert events[1].message.startswith("The rollback to step_000010.ckpt has not helped. The KL")
    assert "Rolled back to step_000009.ckpt" in events[1].message
    assert {one.cause for one in events} == {"kl_explosion"}
    assert get_stop_reason(module.trainer).exit_code == ExitCode.DIVERGED


@pytest.mark.slow
def test_without_a_checkpoint_from_before_the_trouble_the_run_stops(tmp_path):
    divergence = Divergence(lambda step, num_rollbacks: 0.8 if step >= 8 else 0.005)
    saving = Checkpoints(dirpath=str(tmp_path / "checkpoints"), every_n_steps=1, keep_last=2)
    callbacks = [divergence, HealthMonitor(EXPLODING), saving, EventsFile(tmp_path)]
    module = make_module(optimizer=adam)
    fit(module, callbacks=callbacks, max_steps=20)
    *_, stop = read_events(tmp_path)
    assert (stop.kind, stop.step, stop.cause) == ("stop", 11, "kl_explosion")
    assert "no healthy checkpoint from before step 7" in stop.message


def test_with_defaults_a_run_is_rolled_back_also_before_the_first_interval_of_time(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("lit_grpo.runs.checkpoints.callback.time.monotonic", lambda: 0.0)
    first, saving = FirstWeights(), Checkpoints(dirpath=str(tmp_path / "checkpoints"))
    spoil = SpoilWeights(4)
    module = make_module(optimizer=adam)
    callbacks = [spoil, HealthMonitor(), saving, EventsFile(tmp_path), first]
    fit(module, callbacks=callbacks, max_steps=6)
    _, rollback, done = read_events(tmp_path)
    assert (rollback.kind, rollback.step, done.kind) == ("rollback", 4, "done")
    assert_equal(first.weights[4], spoil.before[1])


class SpoilLate(SpoilWeights):
    """Spoil the weights when all other callbacks have seen the step."""


@pytest.mark.slow
def test_weights_spoilt_after_the_monitor_has_looked_are_rolled_back_before_sampling(tmp_path):
    saving = Checkpoints(dirpath=str(tmp_path / "checkpoints"), every_n_steps=1, keep_last=9)
    module, first = make_module(optimizer=adam), FirstWeights()
    callbacks = [HealthMonitor(), saving, EventsFile(tmp_path), SpoilLate(4), first]
    fit(module, callbacks=callbacks, max_steps=8)
    _, rollback, done = read_events(tmp_path)
    assert (rollback.kind, rollback.cause, rollback.step) == ("rollback", "not_finite_weights", 4)
    assert "before this step" in rollback.message
    assert done.kind == "done"
    assert all(weight.isfinite().all() for weight in weights(module).values())


def test_weights_spoilt_without_a_checkpoint_end_the_run_with_words_and_a_cause(tmp_path):
    callbacks = [HealthMonitor(), EventsFile(tmp_path), SpoilLate(2)]
    with pytest.raises(Diverged, match="not_finite_weights.*no healthy checkpoint"):
        fit(make_module(), callbacks=callbacks, max_steps=8)
    *_, crash = read_events(tmp_path)
    assert (crash.kind, crash.cause) == ("crash", "not_finite_weights")


@pytest.mark.slow
def test_the_event_of_a_stop_after_too_many_skipped_updates_names_the_rule(tmp_path):
    rules = {"truncated": Rule(action="skip", patience=1)}
    module = make_module(sampling=Sampling(max_tokens=1))
    fit(module, callbacks=[HealthMonitor(rules), EventsFile(tmp_path)], max_steps=9)
    *_, stop = read_events(tmp_path)
    assert (stop.kind, stop.cause) == ("stop", "truncated")
    assert stop.message.endswith("HealthMonitor skipped the update because of truncated.")


def test_what_the_rollbacks_have_left_is_resumed():
    monitor, again = HealthMonitor(), HealthMonitor()
    monitor._rollback_history.add(at=6, to=2)
    again.load_state_dict(monitor.state_dict())
    assert again.state_dict() == monitor.state_dict()
