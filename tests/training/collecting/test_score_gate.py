"""Missing scores: steps with too many are not trained on, retries, and resuming after a stop."""

import asyncio
import math
import os
import signal

import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import PROMPTS, Keep, ShareOfLowBytes, make_module, make_trainer, start_weights
from small_runs import weights as weights_of

from lit_grpo.callbacks import Checkpoints
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.rewards import Reward
from lit_grpo.rollout import HFEngine
from lit_grpo.runs.files.completions import CompletionsFile
from lit_grpo.runs.shutdown.signals import StopOnSignal
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.training import OutagePolicy, waiting
from lit_grpo.types import Completion, Outcome, Score

NO_RETRY = OutagePolicy(give_up_after_seconds=0)
SHORT_PAUSES = OutagePolicy(first_pause_seconds=0.05, give_up_after_seconds=0.2)


class Flaky(ShareOfLowBytes):
    """Gives no value on the calls whose numbers, counted from 0, are in ``down``."""

    def __init__(self, down=(), outcome=Outcome.ERROR, **settings):
        super().__init__(**settings)
        self.down = down
        self.outcome = outcome
        self.num_calls = 0

    def score(self, prompt, completion):
        self.num_calls += 1
        if self.num_calls - 1 in self.down:
            return Score(value=None, outcome=self.outcome, detail="the service is down")
        return super().score(prompt, completion)


def train(reward, directory=None, *callbacks, ckpt=None, steps=4, outage=NO_RETRY):
    """Train with two prompts per step and four completions each: eight calls per step."""
    module = make_module(rewards=[reward], outage=outage)
    keep = Keep()
    saving = [] if directory is None else [StopOnSignal(), Checkpoints(dirpath=str(directory))]
    trainer = make_trainer(keep, *saving, *callbacks, max_steps=steps)
    trainer.fit(module, PromptLoader(PROMPTS, 2, seed=1), ckpt_path=ckpt, weights_only=True)
    return trainer, module, keep.outputs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The module of a run without an outage."""
    return train(Flaky(), tmp_path_factory.mktemp("undisturbed"))[1]


def assert_resumed_run_equals(undisturbed, directory):
    """Resume with a reward that works; return the trainer and its outputs."""
    ckpt = str(directory / "last.ckpt")
    trainer, module, outputs = train(Flaky(), directory, ckpt=ckpt)
    torch.testing.assert_close(weights_of(module), weights_of(undisturbed), rtol=0, atol=0)
    return trainer, outputs


def test_the_first_retry_is_immediate_and_the_pauses_double_up_to_a_limit():
    policy = OutagePolicy(first_pause_seconds=10, max_pause_seconds=30, give_up_after_seconds=100)
    assert list(policy.pauses()) == [0, 10, 20, 30, 30, 10]
    assert list(OutagePolicy(give_up_after_seconds=0).pauses()) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_absent_fraction", 1.1),
        ("first_pause_seconds", 0),
        ("max_pause_seconds", math.nan),
        ("give_up_after_seconds", -1),
        ("score_deadline_seconds", 0),
    ],
)
def test_a_setting_that_is_out_of_range_is_refused_with_its_key(setting, value):
    with pytest.raises(ValueError, match=f"must be .*, got {value}. Set model.outage.{setting}"):
        OutagePolicy(**{setting: value})


class Told(Callback):
    """Keep what callbacks are told of outages."""

    def __init__(self):
        self.outages = []

    def on_outage(self, trainer, pl_module, outage):
        self.outages.append((outage.cause, outage.message))


@pytest.mark.slow
def test_a_short_outage_delays_a_run_and_changes_nothing_else(undisturbed, caplog):
    # The eight scores of the second step are missing at first and at the first retry.
    reward = Flaky(down=range(8, 24))
    with caplog.at_level("INFO", logger="lit_grpo"):
        trainer, module, outputs = train(reward, None, told := Told(), outage=SHORT_PAUSES)
    assert get_stop_reason(trainer) is None
    ((cause, message),) = told.outages
    assert cause == "score_outage"
    assert "8 of the 8 rows (100%) have no score" in message
    assert caplog.text.count("Enough scores have arrived: training goes on.") == 1
    assert reward.num_calls == 8 * 4 + 16
    assert all(output["rollouts"].valid.all() for output in outputs)
    assert "8 of the 8 rows (100%) have no score" in caplog.text
    torch.testing.assert_close(weights_of(module), weights_of(undisturbed), rtol=0, atol=0)


class Forgetful(Reward):
    """A reward without a return."""

    def score(self, prompt, completion):
        len(completion.text)


def test_a_reward_that_always_returns_none_is_named_once(caplog):
    module = make_module(rewards=[Flaky(), Forgetful()])
    make_trainer(max_steps=2).fit(module, PromptLoader(PROMPTS, 2, seed=1), weights_only=True)
    named = [one for one in caplog.messages if one.startswith("Reward 'forgetful' gave none of 8")]
    assert len(named) == 1


def test_only_missing_scores_are_requested_again():
    reward = Flaky(down=range(5))
    train(reward, steps=1, outage=SHORT_PAUSES)
    assert reward.num_calls == 8 + 5


def test_a_step_is_trained_on_without_its_missing_rows_up_to_the_allowed_fraction():
    (output,) = train(Flaky(down=range(4)), steps=1)[2]
    assert output["rollouts"].valid.sum() == 4
    trainer, module, outputs = train(Flaky(down=range(5)), steps=1)
    assert (outputs, module.global_step) == ([{}], 0)
    assert get_stop_reason(trainer).exit_code == ExitCode.SCORES_ABSENT


def test_missing_scores_of_a_reward_without_weight_do_not_stop_a_run():
    module = make_module(
        rewards=[ShareOfLowBytes(), Flaky(down=range(99), weight=0)], outage=NO_RETRY
    )
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, PromptLoader(PROMPTS, 4))
    assert get_stop_reason(trainer) is None


@pytest.mark.parametrize("outcome", [Outcome.TRUNCATED, Outcome.ABSTAIN])
def test_scores_that_are_missing_because_of_the_completion_do_not_stop_a_run(outcome):
    reward = Flaky(down=range(6), outcome=outcome)
    trainer, _, _ = train(reward, steps=1)
    assert reward.num_calls == 8
    assert get_stop_reason(trainer) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "down_at", [0, 1, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 3))]
)
def test_a_stop_on_an_outage_says_why_and_the_resumed_run_is_the_undisturbed_one(
    tmp_path, down_at, undisturbed
):
    """Stop before the first step, and before the last and the first step of an epoch of two."""
    down = range(8 * down_at, 8 * down_at + 8)
    trainer, module, _ = train(Flaky(down), tmp_path)
    reason = get_stop_reason(trainer)
    assert (reason.exit_code, reason.is_step_unfinished) == (ExitCode.SCORES_ABSENT, True)
    assert "the service is down" in reason.message
    assert module.rollout_step == module.global_step == down_at
    if down_at == 0:
        torch.testing.assert_close(weights_of(module), start_weights(), rtol=0, atol=0)
    trainer, outputs = assert_resumed_run_equals(undisturbed, tmp_path)
    assert len(outputs) == 4 - down_at
    assert trainer.fit_loop.total_batch_idx == 3


def test_the_rows_of_the_step_that_an_outage_ends_are_kept_until_a_resumed_run_repeats_it(tmp_path):
    file = tmp_path / "completions" / "step_000001.parquet"
    train(Flaky(down=range(8, 16)), tmp_path, CompletionsFile(tmp_path))
    rows = pq.read_table(file).to_pylist()
    assert [row["outcome/flaky"] for row in rows] == ["error"] * 8
    assert {row["detail/flaky"] for row in rows} == {"the service is down"}
    ckpt = str(tmp_path / "last.ckpt")
    train(Flaky(), tmp_path, CompletionsFile(tmp_path), ckpt=ckpt)
    repeated = pq.read_table(file).to_pylist()
    assert [row["outcome/flaky"] for row in repeated] == ["ok"] * 8
    names = ("prompt_id", "token_ids")
    assert [[row[one] for one in names] for row in repeated] == [
        [row[one] for one in names] for row in rows
    ]


@pytest.mark.parametrize(
    ("outcome", "on_error"), [(Outcome.BUDGET_SPENT, "mask"), (Outcome.ERROR, "raise")]
)
def test_the_rows_are_kept_too_if_retrying_is_pointless(tmp_path, outcome, on_error):
    reward = Flaky(down=[10], outcome=outcome, on_error=on_error)
    train(reward, tmp_path, CompletionsFile(tmp_path))
    rows = pq.read_table(tmp_path / "completions" / "step_000001.parquet").to_pylist()
    outcomes = [row["outcome/flaky"] for row in rows]
    assert len(outcomes) == 8
    assert outcomes.count(str(outcome)) == 1
    missing = [row["detail/flaky"] for row in rows if row["outcome/flaky"] == "timeout"]
    assert set(missing) <= {"the step ended before it came"}


def test_a_failure_of_a_reward_with_on_error_raise_stops_the_run_before_the_step(tmp_path):
    reward = Flaky(down=[11], on_error="raise")
    trainer, module, _ = train(reward, tmp_path, outage=SHORT_PAUSES)
    reason = get_stop_reason(trainer)
    assert "on_error is 'raise'" in reason.message
    assert (reason.exit_code, module.global_step) == (ExitCode.SCORES_ABSENT, 1)
    assert (tmp_path / "last.ckpt").exists()


def test_a_spent_budget_stops_the_run_at_once_even_if_a_single_score_is_missing():
    trainer, module, _ = train(Flaky(down=[9], outcome=Outcome.BUDGET_SPENT), outage=SHORT_PAUSES)
    message = get_stop_reason(trainer).message
    assert "the judge's budget is spent" in message
    assert "unless the limits.max_cost_usd of its judge is higher" in message
    assert module.global_step == 1


def test_a_score_that_misses_the_deadline_is_a_timeout(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.05)

    class Stuck(ShareOfLowBytes):
        async def score(self, prompt, completion):
            if prompt.id == "x":
                await asyncio.sleep(100)
            return super().score(prompt, completion)

    keep = Keep()
    module = make_module(rewards=[Stuck()], outage=OutagePolicy(score_deadline_seconds=3))
    make_trainer(keep).fit(module, PromptLoader(PROMPTS, 4, shuffle=False))
    (output,) = keep.outputs
    for group in output["rollouts"].groups:
        outcome = Outcome.TIMEOUT if group.prompt.id == "x" else Outcome.OK
        assert [score.outcome for score in group.scores["stuck"]] == [outcome] * 4


def test_a_signal_ends_a_pause_and_the_resumed_run_is_the_undisturbed_one(
    tmp_path, undisturbed, monkeypatch
):
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.05)

    class Interrupt(Callback):
        def on_wait(self, trainer, pl_module, _):
            if reward.num_calls == 8 + 2 * 8 and not trainer.should_stop:  # after the first retry
                os.kill(os.getpid(), signal.SIGTERM)

    reward = Flaky(down=range(8, 10**6))
    outage = OutagePolicy(first_pause_seconds=300)
    trainer, module, _ = train(reward, tmp_path, Interrupt(), outage=outage)
    reason = get_stop_reason(trainer)
    assert (reason.exit_code, reason.is_step_unfinished) == (128 + signal.SIGTERM, True)
    assert module.rollout_step == 1
    assert_resumed_run_equals(undisturbed, tmp_path)


def test_completions_that_could_not_be_sampled_are_excluded_from_the_update():
    (output,) = train_without({1, 6}, max_steps=1)[1]
    batch = output["batch"]
    assert batch.loss_mask.any(1).logical_not().nonzero()[:, 0].tolist() == [1, 6]
    assert batch.advantages[[1, 6]].tolist() == [0, 0]
    assert batch.advantages.abs().sum() > 0


def test_a_step_without_enough_completions_is_not_trained_on():
    trainer, (output,) = train_without(set(range(9)), max_steps=2)
    reason = get_stop_reason(trainer)
    assert (output, trainer.global_step) == ({}, 0)
    assert (reason.exit_code, reason.cause) == (ExitCode.SCORES_ABSENT, "engine_outage")
    assert "completions could not be sampled: 9 of the 16 rows (56%)" in reason.message
    assert "400: the prompt is too long" in reason.message


def train_without(rows, *, max_steps):
    """Train with an engine that cannot sample these rows."""

    class Failing(HFEngine):
        def generate(self, prompts, group_size, sampling, *, seed):
            failed = Completion.failed("400: the prompt is too long")
            for row, one in super().generate(prompts, group_size, sampling, seed=seed):
                yield row, failed if row in rows else one

    keep = Keep()
    trainer = make_trainer(keep, max_steps=max_steps)
    trainer.fit(make_module(engine=Failing()), PromptLoader(PROMPTS, 4))
    return trainer, keep.outputs
