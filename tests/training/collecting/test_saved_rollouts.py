"""What a checkpoint has of rollouts that were sampled ahead, and what a resumed run makes of it."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from overlapping import OverlappingEngine, SaveAhead
from small_runs import ShareOfLowBytes, fit, make_module, weights
from tiny import completion

from lit_grpo.callbacks import Checkpoints
from lit_grpo.rollout import EngineFailed, Sampling
from lit_grpo.stopping import get_stop_reason, stop_run
from lit_grpo.training import waiting
from lit_grpo.training.collecting.saved_rollouts import from_text, to_text
from lit_grpo.types import Outcome, Score, StopReason
from lit_grpo.types.rollouts import ScoredCompletion

NUM_STEPS = 5
SAVED_STEP = 3
NUM_ROWS = 16


class CountingReward(ShareOfLowBytes):
    num_calls = 0

    def score(self, prompt, completion):
        self.num_calls += 1
        return super().score(prompt, completion)


class HeldEngine(OverlappingEngine):
    """Samples 5 rows of the fourth generation, and the others only once it is released."""

    def __init__(self):
        super().__init__()
        self.is_held, self.may_go_on = threading.Event(), threading.Event()

    def generate(self, prompts, group_size, sampling, *, seed):
        is_fourth = self.num_generations == 3
        rows = super().generate(prompts, group_size, sampling, seed=seed)
        for number, row in enumerate(rows):
            if is_fourth and number == 5:
                self.is_held.set()
                assert self.may_go_on.wait(60)
            yield row


class Release(Callback):
    def __init__(self, engine):
        self.engine = engine

    def on_train_batch_end(self, trainer, pl_module, *_):
        if pl_module.rollout_step == SAVED_STEP:
            self.engine.may_go_on.set()


def train(engine, *callbacks, ckpt_path=None, allow_changes=False, **settings):
    """Train with one step sampled ahead; return the module and what each step returned."""
    settings = {"rewards": [CountingReward(name="low")]} | settings
    module = make_module(engine=engine, max_head_offpolicyness=1, **settings)
    module.allow_changes = allow_changes
    return module, fit(module, callbacks=callbacks, ckpt_path=ckpt_path, max_steps=NUM_STEPS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run, its steps, and a checkpoint saved when all that was ahead was sampled."""
    path, engine = tmp_path_factory.mktemp("whole") / "some.ckpt", OverlappingEngine()
    saving = SaveAhead(path, SAVED_STEP, lambda: engine.num_ended == SAVED_STEP + 1)
    return *train(engine, saving), path


def versions(output) -> list[int]:
    """Return for each row the version that sampled it."""
    return [one.policy_versions[0] for one in output["rollouts"].completions]


def test_a_resumed_run_goes_on_with_what_was_ahead_and_is_the_undisturbed_one(whole):
    module, expected, path = whole
    resumed, outputs = train(engine := OverlappingEngine(), ckpt_path=path)
    assert [set(versions(one)) for one in outputs] == [{2}, {3}]
    assert engine.num_generations == 1  # of the step after what was ahead
    assert resumed.rewards.rewards[0].num_calls == NUM_ROWS
    for one, other in zip(outputs, expected[SAVED_STEP:], strict=True):
        assert one["rollouts"].completions == other["rollouts"].completions
        assert one["rollouts"].rewards.equal(other["rollouts"].rewards)
    torch.testing.assert_close(weights(resumed), weights(module), rtol=0, atol=0)


def test_a_save_does_not_wait_and_only_what_was_unfinished_is_sampled_again(tmp_path, whole):
    path, held, engine = tmp_path / "some.ckpt", HeldEngine(), OverlappingEngine()
    # The rows that are held are released after the save.
    train(held, SaveAhead(path, SAVED_STEP, held.is_held.is_set), Release(held))
    resumed, outputs = train(engine, ckpt_path=path)
    first = outputs[0]
    assert sorted(versions(first)) == [2] * 5 + [3] * (NUM_ROWS - 5)
    expected = whole[1][SAVED_STEP]["rollouts"].completions
    for row, version in enumerate(versions(first)):
        is_same = first["rollouts"].completions[row] == expected[row]
        assert is_same == (version == 2)
    assert resumed.rewards.rewards[0].num_calls == NUM_ROWS - 5 + NUM_ROWS
    assert not {*engine.seeds} & {*held.seeds[: SAVED_STEP + 1]}
    assert first["metrics"]["rollout/head_offpolicyness_max"] == 1
    assert first["metrics"]["rollout/head_offpolicyness_mean"] == 5 / NUM_ROWS
    assert set(versions(outputs[1])) == {3}


CHANGES = {
    "sampling": {"sampling": Sampling(max_tokens=7, stop_token_ids=tuple(range(40)))},
    "the bound": {"max_head_offpolicyness": 2},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_sampled_with_other_settings_is_sampled_again(change, whole, caplog):
    settings = {"engine": OverlappingEngine(), "max_head_offpolicyness": 1} | CHANGES[change]
    module = make_module(**settings)
    module.allow_changes = True
    with caplog.at_level("INFO"):
        outputs = fit(module, ckpt_path=whole[2], max_steps=NUM_STEPS)
    assert set(versions(outputs[0])) == {3}
    assert f"rollout step {SAVED_STEP + 1} is sampled again" in caplog.text


class StopInReward(Callback):
    """End the run in the wait for the scores of a step, once all that is ahead is finished."""

    def on_wait(self, trainer, pl_module, _):
        running = pl_module.events.running
        is_here = running is not None and running.name == "reward"
        is_sampled = pl_module.engine.num_ended == SAVED_STEP + 2
        if is_here and is_sampled and pl_module.rewards.num_unscored() == {"low": NUM_ROWS - 4}:
            reason = StopReason(exit_code=1, message="left", is_step_unfinished=True)
            stop_run(trainer, reason)


class HeldReward(ShareOfLowBytes):
    """Scores 4 rows of the step that is left, which version 2 has sampled, and all other rows."""

    num_calls = 0

    async def score(self, prompt, completion):
        self.num_calls += completion.policy_versions[0] == 2
        if completion.policy_versions[0] == 2 and self.num_calls > 4:
            await asyncio.sleep(600)
        return super().score(prompt, completion)


def test_a_step_that_was_left_goes_on_with_its_completions_and_lacks_only_scores(
    tmp_path, whole, monkeypatch
):
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.01)
    saving = Checkpoints(dirpath=str(tmp_path), every_n_seconds=None)
    rewards = [HeldReward(name="low")]
    left, _ = train(OverlappingEngine(), StopInReward(), saving, rewards=rewards)
    assert get_stop_reason(left.trainer).message == "left"
    assert left.rollout_step == SAVED_STEP
    last = tmp_path / "last.ckpt"
    resumed, outputs = train(engine := OverlappingEngine(), ckpt_path=last, allow_changes=True)
    assert len(outputs) == NUM_STEPS - SAVED_STEP
    assert engine.num_generations == 0
    assert resumed.rewards.rewards[0].num_calls == NUM_ROWS - 4
    torch.testing.assert_close(weights(resumed), weights(whole[0]), rtol=0, atol=0)


def test_nothing_is_kept_of_an_engine_that_has_given_up(tmp_path):
    class Failing(OverlappingEngine):
        def load_weights(self, policy, version):
            if version == SAVED_STEP:
                raise EngineFailed("a server does not have the policy's weights")
            super().load_weights(policy, version)

    saving = Checkpoints(dirpath=str(tmp_path), every_n_seconds=None)
    module, _ = train(Failing(), saving)
    assert get_stop_reason(module.trainer).exit_code == 5
    assert "rollouts" not in torch.load(tmp_path / "last.ckpt", weights_only=True)


def test_what_a_checkpoint_has_is_saved_again_until_it_is_used_or_rolled_back():
    collector = make_module(engine=OverlappingEngine(), max_head_offpolicyness=1).collector
    saved = {number: {"made_of": "", "rows": "{}"} for number in (2, 3)}
    collector.load_state_dict([saved])
    assert collector.state_dict(3) == [{3: saved[3]}]
    collector.cancel()
    assert collector.state_dict(3) == [{}]


def test_rows_are_exact_as_text_that_any_load_reads(tmp_path):
    step = (np.int64(1), np.float32(0.1))
    rows = {
        3: ScoredCompletion(
            completion=completion([5, 6], text='«"\ud800\n', logprobs=[-0.1, -1 / 3]),
            scores={
                "low": Score(value=np.float64(1 / 3), steps=(step,), num_values=2, seconds=0.1),
                "own": Score(value=torch.tensor(0.5)),
                "none": Score(value=None, outcome=Outcome.ABSTAIN, detail="does not apply"),
            },
        ),
    }
    torch.save({"rows": to_text(rows)}, tmp_path / "some.ckpt")
    assert from_text(torch.load(tmp_path / "some.ckpt", weights_only=True)["rows"]) == rows
