"""The last line of a run that is not done, which says how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from lightning.pytorch.callbacks import Callback
from run_logs import close_logs, workplace
from small_runs import make_module
from text_rewards import Fading
from toy_rollouts import fit, outputs, rollouts

from lit_grpo import AdditionData, Trainer
from lit_grpo.__main__ import main
from lit_grpo.callbacks import Checkpoints, ZeroRewardBreaker
from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.runs.shutdown.resume_hint import RESUME_CALL, how_to_resume
from lit_grpo.stopping import ExitCode, stop_run
from lit_grpo.types import StopReason

REMEDY = CAUSES["no_reward"].remedies[0]
FIRST = f"Resumed as it is, this run would stop again. First remove the cause. {REMEDY} "
BREAKER = {"class_path": "ZeroRewardBreaker", "init_args": {"alert_after": 1, "stop_after": 2}}


@pytest.fixture
def here(tmp_path) -> Iterator[Path]:
    with workplace(tmp_path):
        yield tmp_path


def train(here: Path, reward: str) -> str:
    """Train until the breaker stops the run, and return the last line of its log."""
    config = BASE | {
        "trainer": BASE["trainer"] | {"max_steps": 9, "callbacks": [BREAKER]},
        "model": BASE["model"] | {"rewards": [reward]},
    }
    (here / "mine.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config=mine.yaml", "--run_dir=run"]) == ExitCode.NO_REWARD
    return last_line(here / "run")


def last_line(run_dir: Path) -> str:
    return (run_dir / "run.log").read_text().splitlines()[-1].split(": ", 1)[1]


def test_a_run_whose_rewards_faded_goes_on_from_its_healthy_checkpoint_once_mended(here):
    line = train(here, "text_rewards.Fading")
    checkpoint = "run/checkpoints/step_000001.ckpt"
    then = "Then go on after 1 step (the newest healthy checkpoint) with: "
    command = f"lit-grpo fit run --ckpt_path {checkpoint}"
    assert line == f"{FIRST}{then}{command}"
    assert main([*shlex.split(command)[1:], "--trainer.max_steps=2"]) == 0
    assert f"resuming from {checkpoint} after rollout step 1" in (here / "run/run.log").read_text()


def test_a_run_that_never_had_a_reward_is_told_to_start_anew_or_to_resume_once_mended(here):
    line = train(here, "MathReward")  # the policy has random weights
    none = "No checkpoint is from a healthy step: then start a new run, or resume this one "
    assert line == f"{FIRST}{none}after 2 steps with: lit-grpo fit run"


def test_a_program_gets_a_call_with_the_healthy_checkpoint(tmp_path):
    data = AdditionData(1, train_size=8, validation_size=0, prompts_per_step=2)
    breaker = ZeroRewardBreaker(alert_after=1, stop_after=2)
    settings = {"accelerator": "cpu", "enable_progress_bar": False}
    trainer = Trainer(tmp_path, max_steps=9, callbacks=[breaker], **settings)
    trainer.fit(make_module(group_size=2, rewards=[Fading()]), data)
    close_logs()
    call = f'trainer.fit(…, ckpt_path="{tmp_path}/checkpoints/step_000001.ckpt")'
    assert last_line(tmp_path).endswith(f"(the newest healthy checkpoint) with: {call}")


class Stop(Callback):
    def __init__(self, exit_code: int, cause: str) -> None:
        self.reason = StopReason(exit_code=exit_code, message="enough", cause=cause)

    def on_train_batch_end(self, trainer, *args):
        stop_run(trainer, self.reason)


@pytest.mark.parametrize(
    ("exit_code", "cause", "expected"),
    [
        (20, "", "Resume after 1 step with: "),
        (ExitCode.TIME_IS_UP, "", "Resume after 1 step with: "),
        (
            ExitCode.NO_REWARD,
            "nothing_trained",
            "Resumed as it is, this run would stop again. First remove the cause. Look at "
            "reward/valid_fraction and the outcomes in completions/. Then resume after 1 step "
            "with: ",
        ),
        (
            ExitCode.NO_REWARD,
            "a cause of a callback",
            "Resumed as it is, this run would stop again. First remove the cause. Then resume "
            "after 1 step with: ",
        ),
    ],
)
def test_only_a_lack_of_rewards_must_be_mended_before_the_newest_is_resumed(
    tmp_path, exit_code, cause, expected
):
    step = outputs(rollouts([[0.0, 1.0]]))
    callbacks = [Stop(exit_code, cause), Checkpoints(dirpath=str(tmp_path / "checkpoints"))]
    trainer = fit(lambda _: step, callbacks)
    for resume in ("lit-grpo fit run", RESUME_CALL):
        assert how_to_resume(trainer, tmp_path, resume) == expected + resume


def test_a_run_without_a_checkpoint_is_told_nothing(tmp_path):
    trainer = fit(lambda _: outputs(rollouts([[0.0, 1.0]])), [Stop(20, "")])
    assert how_to_resume(trainer, tmp_path, RESUME_CALL) == ""
