"""Absent scores: never trained on, asked for again, and a stop that loses nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import SUPPORT
from small_runs import PROMPTS, Keep, ShareOfLowBytes, make_module, make_trainer, start_weights
from small_runs import weights as weights_of

from lit_grpo.callbacks import ExitCheckpoint
from lit_grpo.data import PromptLoader
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.training import OutagePolicy
from lit_grpo.types import Outcome, Score

AT_ONCE = OutagePolicy(give_up_after_seconds=0)
SOON = OutagePolicy(first_pause_seconds=0.05, give_up_after_seconds=0.2)


class Flaky(ShareOfLowBytes):
    """Gives no value on the calls whose numbers, from 0, are in ``down``."""

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


def train(reward, tmp_path=None, *, ckpt=None, steps=4, outage=AT_ONCE):
    """A run of two prompts a step, four completions each: eight calls a step."""
    module = make_module(rewards=[reward], outage=outage)
    keep = Keep()
    callbacks = [keep] if tmp_path is None else [keep, ExitCheckpoint(str(tmp_path))]
    trainer = make_trainer(*callbacks, max_steps=steps)
    trainer.fit(module, PromptLoader(PROMPTS, 2, seed=1), ckpt_path=ckpt, weights_only=True)
    return trainer, module, keep.outputs


def test_the_first_further_attempt_comes_at_once_and_pauses_double_up_to_a_limit():
    policy = OutagePolicy(first_pause_seconds=10, max_pause_seconds=30, give_up_after_seconds=100)
    assert list(policy.pauses()) == [0, 10, 20, 30, 30, 10]
    assert list(OutagePolicy(give_up_after_seconds=0).pauses()) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_absent_fraction", 1.1),
        ("first_pause_seconds", 0),
        ("max_pause_seconds", 0),
        ("give_up_after_seconds", -1),
        ("score_deadline_seconds", 0),
    ],
)
def test_impossible_settings_name_the_key(setting, value):
    with pytest.raises(ValueError, match=f"model.outage.{setting}"):
        OutagePolicy(**{setting: value})


def test_a_short_outage_is_waited_out_and_changes_nothing(caplog):
    _, undisturbed, _ = train(Flaky(), steps=3)
    # All eight scores of the second step are absent, and so they are when asked for again.
    reward = Flaky(down=range(8, 24))
    trainer, module, outputs = train(reward, steps=3, outage=SOON)
    assert get_stop_reason(trainer) is None
    assert reward.num_calls == 8 * 3 + 16
    assert all(output["rollouts"].valid.all() for output in outputs)
    assert "8 of the 8 rows (100%) have no score" in caplog.text
    for name, expected in weights_of(undisturbed).items():
        torch.testing.assert_close(weights_of(module)[name], expected, rtol=0, atol=0)


def test_only_absent_scores_are_asked_for_again():
    reward = Flaky(down=range(5))
    train(reward, steps=1, outage=SOON)
    assert reward.num_calls == 8 + 5


def test_up_to_the_fraction_a_step_is_trained_on_without_its_absent_rows():
    (output,) = train(Flaky(down=range(4)), steps=1)[2]
    assert output["rollouts"].valid.sum() == 4
    trainer, module, outputs = train(Flaky(down=range(5)), steps=1)
    assert (outputs, module.global_step) == ([{}], 0)
    assert get_stop_reason(trainer).exit_code == ExitCode.SCORES_ABSENT


def test_a_reward_without_weight_never_holds_a_run_up():
    module = make_module(
        rewards=[ShareOfLowBytes(), Flaky(down=range(99), weight=0)], outage=AT_ONCE
    )
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, PromptLoader(PROMPTS, 4))
    assert get_stop_reason(trainer) is None


@pytest.mark.parametrize("outcome", [Outcome.TRUNCATED, Outcome.ABSTAIN])
def test_what_lies_in_the_completion_is_no_outage(outcome):
    reward = Flaky(down=range(6), outcome=outcome)
    trainer, module, _ = train(reward, steps=1)
    assert reward.num_calls >= 8
    assert get_stop_reason(trainer) is None


@pytest.mark.parametrize("down_at", [0, 1, 2, 3])
def test_a_stop_on_an_outage_says_why_and_the_resumed_run_is_the_undisturbed_one(
    tmp_path, down_at, capfd
):
    """Two steps make an epoch: stops at its begin, its end, and before any step."""
    _, undisturbed, _ = train(Flaky(), tmp_path / "whole")
    down = range(8 * down_at, 8 * down_at + 8)
    trainer, module, _ = train(Flaky(down), tmp_path / "cut")
    reason = get_stop_reason(trainer)
    assert (reason.exit_code, reason.is_step_unfinished) == (ExitCode.SCORES_ABSENT, True)
    assert "the service is down" in reason.message
    assert module.rollout_step == module.global_step == down_at
    if down_at == 0:
        for name, expected in start_weights().items():
            torch.testing.assert_close(weights_of(module)[name], expected, rtol=0, atol=0)
    trainer, module, outputs = train(
        Flaky(), tmp_path / "cut", ckpt=str(tmp_path / "cut" / "last.ckpt")
    )
    assert len(outputs) == 4 - down_at
    assert trainer.fit_loop.total_batch_idx == 3
    for name, expected in weights_of(undisturbed).items():
        torch.testing.assert_close(weights_of(module)[name], expected, rtol=0, atol=0)


def test_a_reward_that_raises_for_good_stops_the_run_before_the_step(tmp_path):
    reward = Flaky(down=[11], on_error="raise")
    trainer, module, _ = train(reward, tmp_path, outage=SOON)
    reason = get_stop_reason(trainer)
    assert "on_error is 'raise'" in reason.message
    assert (reason.exit_code, module.global_step) == (ExitCode.SCORES_ABSENT, 1)
    assert (tmp_path / "last.ckpt").exists()


def test_spent_money_stops_the_run_at_once_however_few_rows_lack_a_score():
    trainer, module, _ = train(Flaky(down=[9], outcome=Outcome.BUDGET_SPENT), outage=SOON)
    assert "the judge's budget is spent" in get_stop_reason(trainer).message
    assert module.global_step == 1


def test_what_is_not_scored_by_the_deadline_is_a_timeout():
    class Stuck(ShareOfLowBytes):
        async def score(self, prompt, completion):
            if prompt.id == "x":
                await asyncio.sleep(100)
            return super().score(prompt, completion)

    module = make_module(rewards=[Stuck()], outage=OutagePolicy(score_deadline_seconds=0.5))
    keep = Keep()
    make_trainer(keep).fit(module, PromptLoader(PROMPTS, 4, shuffle=False))
    (output,) = keep.outputs
    for group in output["rollouts"].groups:
        outcome = Outcome.TIMEOUT if group.prompt.id == "x" else Outcome.OK
        assert [score.outcome for score in group.scores["stuck"]] == [outcome] * 4


SCRIPT = """
import sys
sys.path[:0] = {folders!r}
import torch
from test_score_gate import Flaky, train
from pathlib import Path
from lit_grpo.training.score_gate import OutagePolicy
from lit_grpo.stopping import get_stop_reason

torch.set_num_threads(1)
down = range(8, 10**6) if "down" in sys.argv else ()
ckpt = "last.ckpt" if "resume" in sys.argv else None
outage = OutagePolicy(first_pause_seconds=300)
trainer, module, _ = train(Flaky(down), Path("."), ckpt=ckpt, outage=outage)
reason = get_stop_reason(trainer)
torch.save(module.policy.model.state_dict(), "weights.pt")
sys.exit(reason.exit_code if reason else 0)
"""


def start(directory: Path, *arguments: str) -> subprocess.Popen:
    directory.mkdir(exist_ok=True)
    folders = [str(SUPPORT), str(Path(__file__).parent)]
    (directory / "run.py").write_text(SCRIPT.format(folders=folders))
    return subprocess.Popen(
        [sys.executable, "run.py", *arguments],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen, text: str) -> None:
    for line in process.stderr:
        if text in line:
            return
    pytest.fail(f"the run ended without {text!r}")


@pytest.mark.slow
def test_a_signal_ends_a_pause_and_the_resumed_run_is_the_undisturbed_one(tmp_path):
    with start(tmp_path / "cut", "down") as paused:
        try:
            wait_for(paused, "Retrying in 300 s")
            os.kill(paused.pid, signal.SIGTERM)
            assert paused.wait(timeout=60) == 128 + signal.SIGTERM
        finally:
            paused.kill()
    for directory, arguments in (("cut", ["resume"]), ("whole", [])):
        run = start(tmp_path / directory, *arguments)
        _, errors = run.communicate(timeout=200)
        assert run.returncode == 0, errors
    resumed, whole = (torch.load(tmp_path / name / "weights.pt") for name in ("cut", "whole"))
    for name, expected in whole.items():
        torch.testing.assert_close(resumed[name], expected, rtol=0, atol=0)
