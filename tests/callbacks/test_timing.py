from __future__ import annotations

import csv
import logging
import re

import pytest
import tiny
import torch
from toy_rollouts import completion, failed, fit, outputs, rollouts, train_batch

from lit_grpo.callbacks import TimingLog
from lit_grpo.diagnostics import waits
from lit_grpo.rewards import FunctionReward, MathReward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.runs.files.metrics import MetricsFile
from lit_grpo.types import Outcome, Score, Stage

BATCH = rollouts(
    [[0.0, 1.0, failed(Outcome.TIMEOUT, seconds=30.0)]],
    [completion("7"), completion("seven"), completion("sieben")],
)
STEP = outputs(BATCH, train_batch([-1.0, 1.0, 0.0]), **{"reward/mean": 0.5, "reward/std": 0.25})

STAGES = (
    Stage(name="weight_sync", seconds=0.5),
    Stage(name="generation", seconds=2.0),
    Stage(name="reward", seconds=0.125),
    Stage(name="micro_batch", seconds=0.25, micro_batch=0, details={"pg_loss": -0.5, "rows": 2}),
    Stage(name="micro_batch", seconds=0.25, micro_batch=1, details={"kl": torch.tensor(0.01)}),
    Stage(name="update", seconds=0.75),
)


class Stages(TimingLog):
    """Receives the stages that a module would report during its step."""

    def __init__(self, stages_of_step, **options):
        super().__init__(**options)
        self.stages_of_step = stages_of_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for stage in self.stages_of_step(batch_idx):
            self.on_stage_end(trainer, pl_module, stage)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def rows(tmp_path, callback, make_outputs=lambda step: STEP, steps=2):
    file = MetricsFile(tmp_path)
    fit(make_outputs, [callback], steps=steps, logger=file)
    with file.path.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_stage_seconds_are_in_the_row_of_the_step(tmp_path):
    first, second = rows(tmp_path, Stages(lambda step: STAGES))
    assert first["timing/generation_duration_s"] == "2.0"
    assert first["timing/reward_exposed_duration_s"] == "0.125"
    assert first["timing/update_duration_s"] == "0.75"
    assert first["timing/weight_sync_duration_s"] == "0.5"
    assert first["policy/loss"]
    assert second["timing/generation_duration_s"] == "2.0"


def test_a_stage_that_runs_twice_is_summed_and_one_that_is_skipped_took_no_time(tmp_path):
    twice = [Stage(name="logprob", seconds=0.25), Stage(name="logprob", seconds=0.5)]
    first, second = rows(tmp_path, Stages(lambda step: twice if step == 0 else []))
    assert first["timing/logprob_duration_s"] == "0.75"
    assert second["timing/logprob_duration_s"] == "0.0"
    assert "timing/generation_duration_s" not in first


def test_gpu_phase_is_the_step_without_the_exposed_reward(tmp_path):
    first, _ = rows(tmp_path, Stages(lambda step: STAGES))
    step = float(first["timing/step_duration_s"])
    assert float(first["timing/gpu_phase_duration_s"]) == pytest.approx(step - 0.125, abs=1e-6)


def test_the_reward_total_sums_all_scores_including_failed_ones(tmp_path):
    first, _ = rows(tmp_path, TimingLog())
    assert float(first["timing/reward_total_duration_s"]) == 0.25 + 0.25 + 30.0


def test_tokens_per_second_counts_completion_tokens(tmp_path):
    first, _ = rows(tmp_path, TimingLog())
    tokens = float(first["perf/tokens_per_second"]) * float(first["timing/step_duration_s"])
    assert tokens == pytest.approx(1 + 5 + 6, rel=1e-4)


def test_without_a_gpu_memory_is_resident_memory_and_nothing_is_reserved(tmp_path):
    first, _ = rows(tmp_path, TimingLog())
    assert 0.05 < float(first["perf/memory_allocated_gb"]) < 16
    assert "perf/memory_reserved_gb" not in first


def test_a_module_without_rollouts_logs_its_step_only(tmp_path):
    first, _ = rows(tmp_path, TimingLog(), make_outputs=lambda step: {})
    assert [name for name in first if name.startswith(("timing/", "perf/"))] == [
        "timing/step_duration_s",
        "perf/memory_allocated_gb",
    ]


def stage_log(tmp_path, caplog, **options):
    with caplog.at_level(logging.INFO, logger="lit_grpo"):
        rows(tmp_path, Stages(lambda step: STAGES, **options), steps=1)
    ours = [record for record in caplog.records if record.name.startswith("lit_grpo")]
    return [record.getMessage() for record in ours if record.levelno == logging.INFO]


def test_stage_log_has_a_line_as_each_stage_ends_and_one_for_the_step(tmp_path, caplog):
    lines = stage_log(tmp_path, caplog, stages=True)
    assert len(lines) == len(STAGES) + 1
    number = r"\d+\.\d\d"
    assert re.fullmatch(rf"step 1  generation +2\.00 s +{number} GiB", lines[1])
    assert re.fullmatch(
        rf"step 1  micro_batch 0 +0\.25 s +{number} GiB  pg_loss -0\.5  rows 2", lines[3]
    )
    assert lines[4].endswith("GiB  kl 0.01")
    assert re.fullmatch(
        rf"step 1  total +{number} s +{number} GiB  rewards 0\.500±0\.250 \(2 of 3 valid\)",
        lines[-1],
    )


def test_there_is_no_stage_log_by_default(tmp_path, caplog):
    assert stage_log(tmp_path, caplog) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_on_a_gpu_is_the_peak_of_the_step(tmp_path):
    def allocate_in_first_step(step):
        if step == 0:
            torch.empty(2**28, dtype=torch.uint8, device="cuda")
        return STEP

    file = MetricsFile(tmp_path)
    fit(allocate_in_first_step, [TimingLog()], steps=2, logger=file, accelerator="gpu")
    with file.path.open(newline="") as opened:
        first, second = csv.DictReader(opened)
    assert 0.25 <= float(first["perf/memory_allocated_gb"]) < 0.5
    assert float(second["perf/memory_allocated_gb"]) < 0.25
    assert float(first["perf/memory_reserved_gb"]) >= 0.25


class SlowRewards(TimingLog):
    """Waits for rewards in these steps; the toy module has no stages, and rewards only if given."""

    def __init__(self, steps, rewards=()):
        super().__init__()
        self.steps = steps
        self.rewards = rewards

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.rewards:
            pl_module.rewards = RewardSuite(self.rewards)
        seconds = 1e6 if batch_idx in self.steps else 0.0
        self.on_stage_end(trainer, pl_module, Stage(name="reward", seconds=seconds))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def warnings_of_waits(monkeypatch, caplog, callback, rollouts, steps=12):
    monkeypatch.setattr(waits, "MIN_STEP_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        fit(lambda _: outputs(rollouts), [callback], steps=steps)
    messages = [one.getMessage() for one in caplog.records]
    return [one for one in messages if "waiting for rewards" in one]


def test_the_warning_of_a_wait_is_logged_once_in_many_steps(monkeypatch, caplog):
    slow = SlowRewards(range(12))
    (message,) = warnings_of_waits(monkeypatch, caplog, slow, rollouts([[0.0, 1.0]]))
    assert message.startswith("step 3: ")


def test_a_wait_for_the_start_of_workers_is_not_worth_a_warning(monkeypatch, caplog):
    slow = SlowRewards({0, 1, 6, 7})
    assert warnings_of_waits(monkeypatch, caplog, slow, rollouts([[0.0, 1.0]])) == []


def test_three_waits_within_five_steps_are_worth_a_warning(monkeypatch, caplog):
    slow = SlowRewards({1, 3, 5})
    (message,) = warnings_of_waits(monkeypatch, caplog, slow, rollouts([[0.0, 1.0]]))
    assert message.startswith("step 6: ")


def brevity(completions, **columns):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("seconds", "advice"),
    [
        ({"brevity": 0.5, "math": 0.9}, "'brevity' takes longest and runs in one thread. Make it"),
        ({"brevity": 0.1, "math": 0.9}, "'math' takes longest and has 2 worker processes. Raise"),
    ],
)
def test_the_advice_suits_the_reward_that_takes_longest(monkeypatch, caplog, seconds, advice):
    """The calls of the function run one after the other, those of `MathReward` at a time."""
    scores = {name: [[Score(value=1.0, seconds=one)] * 4] for name, one in seconds.items()}
    batch = tiny.rollouts(scores["math"], [[completion()] * 4], parts=scores)
    slow = SlowRewards(range(3), [FunctionReward(brevity), MathReward()])
    (message,) = warnings_of_waits(monkeypatch, caplog, slow, batch, steps=3)
    assert advice in message
    assert ("ProcessReward" in message) == ("one thread" in advice)


async def slow_brevity(completions, **columns):
    return [0.0] * len(completions)


def test_the_scores_of_a_grouped_call_share_its_seconds(monkeypatch, caplog):
    """One asynchronous call of 1.2 s for the group, against the longest call of 0.9 s."""
    seconds = {"slow_brevity": 0.3, "math": 0.9}
    scores = {name: [[Score(value=1.0, seconds=one)] * 4] for name, one in seconds.items()}
    batch = tiny.rollouts(scores["math"], [[completion()] * 4], parts=scores)
    slow = SlowRewards(range(3), [FunctionReward(slow_brevity), MathReward()])
    (message,) = warnings_of_waits(monkeypatch, caplog, slow, batch, steps=3)
    assert "'slow_brevity' takes longest and is async" in message
