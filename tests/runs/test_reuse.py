"""What has the state of another run does not take part in a new one."""

import shutil
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from python_runs import train
from run_logs import close_logs
from small_runs import ShareOfLowBytes, make_module
from tiny import LLAMA

from lit_grpo import (
    AdditionData,
    Evaluation,
    GRPOModule,
    Policy,
    Reward,
    Sampling,
    SFTModule,
    Trainer,
)
from lit_grpo.callbacks import Checkpoints, TimingLog, ZeroRewardBreaker
from lit_grpo.runs.reuse import claim_for_run
from lit_grpo.types import UserError


class Counting(Callback):
    """A callback of a program, with a state."""

    def state_dict(self) -> dict:
        return {"steps": 3}


@pytest.mark.parametrize(
    "make", [Checkpoints, ModelCheckpoint, ZeroRewardBreaker, TimingLog, Counting]
)
def test_a_callback_with_a_state_belongs_to_one_run(make, tmp_path):
    shared = make()
    Trainer(tmp_path / "a", callbacks=[shared], accelerator="cpu")
    Trainer(tmp_path / "a", callbacks=[shared], accelerator="cpu")
    message = rf"this {make.__name__} belongs to the run {tmp_path / 'a'}: .* Make a new"
    with pytest.raises(UserError, match=message):
        Trainer(tmp_path / "b", callbacks=[shared], accelerator="cpu")
    assert not (tmp_path / "b").exists()


def test_a_callback_that_was_refused_with_another_belongs_to_no_run(tmp_path):
    class OwnTiming(TimingLog):
        """A callback of a program that keeps what its class keeps."""

    used, new = OwnTiming(), Counting()
    claim_for_run([used], tmp_path / "a")
    with pytest.raises(UserError, match="this OwnTiming belongs to the run"):
        claim_for_run([new, used], tmp_path / "b")
    claim_for_run([new], tmp_path / "c")


def test_a_run_is_the_same_by_any_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shared = Counting()
    claim_for_run([shared], Path("run"))
    claim_for_run([shared], tmp_path / "run")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(UserError, match="belongs to the run"):
        claim_for_run([shared], Path("run"))


def test_a_logger_belongs_to_one_run_and_a_callback_without_a_state_to_any(tmp_path):
    shared, logger = Callback(), CSVLogger(tmp_path)
    Trainer(tmp_path / "a", callbacks=shared, logger=logger, accelerator="cpu")
    Trainer(tmp_path / "b", callbacks=shared, accelerator="cpu")
    with pytest.raises(UserError, match="this CSVLogger belongs .* Set logger of Trainer"):
        Trainer(tmp_path / "b", logger=logger, accelerator="cpu")


def test_a_callback_goes_on_in_its_run_and_does_not_start_it_again(tmp_path):
    shared = Counting()
    train(tmp_path / "run", shared, max_steps=1)
    train(tmp_path / "run", shared, max_steps=2, ckpt_path="last")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match="this Counting belongs to the run"):
        train(tmp_path / "run", shared, max_steps=1)


def test_a_policy_that_was_trained_starts_no_other_run(tmp_path):
    def fit(name: str) -> None:
        module = GRPOModule(
            policy,
            [ShareOfLowBytes()],
            group_size=2,
            sampling=Sampling(max_tokens=4),
            evaluation=Evaluation(before_training=False),
        )
        data = AdditionData(1, train_size=4, validation_size=0, prompts_per_step=2)
        settings = {"accelerator": "cpu", "enable_progress_bar": False}
        Trainer(tmp_path / name, max_steps=1, **settings).fit(module, data)
        close_logs()

    policy = Policy(architecture=LLAMA)
    fit("one")
    with pytest.raises(UserError, match=f"this policy was trained in {tmp_path / 'one'}") as error:
        fit("two")
    assert f"use the policy {tmp_path / 'one'}/final" in str(error.value)
    assert not (tmp_path / "two").exists()


class Counts(Reward):
    """A reward of a program, which pays more from step to step."""

    calls = 0

    def score(self, prompt, completion):
        self.calls += 1
        return float(self.calls)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def fit_with(reward: Reward, run_dir: Path, **settings) -> None:
    data = AdditionData(1, train_size=4, validation_size=0, prompts_per_step=2)
    module = make_module(rewards=[reward])
    trainer = Trainer(run_dir, accelerator="cpu", enable_progress_bar=False, max_steps=1)
    trainer.fit(module, data, **settings)
    close_logs()


def test_a_reward_with_a_state_goes_on_in_its_run_and_starts_no_other(tmp_path):
    shared = Counts()
    fit_with(shared, tmp_path / "one")
    fit_with(shared, tmp_path / "one", ckpt_path="auto")
    with pytest.raises(UserError, match=rf"the state .* of the run {tmp_path / 'one'}, and a new"):
        fit_with(shared, tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_a_reward_without_a_state_may_be_shared(tmp_path):
    shared = ShareOfLowBytes()
    for name in ("one", "two"):
        fit_with(shared, tmp_path / name)


@pytest.mark.parametrize("what", ["module", "policy"])
def test_what_another_trainer_has_trained_starts_no_run(what, tmp_path):
    policy = Policy(architecture=LLAMA)
    first = SFTModule(policy, sampling=Sampling(max_tokens=4))
    data = AdditionData(1, train_size=4, validation_size=0, prompts_per_step=2)
    settings = {"accelerator": "cpu", "enable_progress_bar": False, "max_steps": 1}
    L.Trainer(**settings, logger=False, enable_checkpointing=False).fit(first, data)
    module = first if what == "module" else SFTModule(policy, sampling=Sampling(max_tokens=4))
    with pytest.raises(
        UserError,
        match=rf"^this {what} was trained before, by a lightning\.Trainer or with fast_dev_run",
    ):
        Trainer(tmp_path / "run", **settings).fit(module, data, ckpt_path="auto")
    assert not (tmp_path / "run").exists()
    policy.save_pretrained(tmp_path / "trained")
    begun = SFTModule(Policy(str(tmp_path / "trained")), sampling=Sampling(max_tokens=4))
    Trainer(tmp_path / "run", **settings).fit(begun, data)
    close_logs()
