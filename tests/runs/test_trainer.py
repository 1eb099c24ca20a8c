"""The trainer for scripts and notebooks: the same files as the command line, and exact resume."""

import os
import re
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from python_runs import StopAfter, train
from run_logs import close_logs
from safetensors.torch import load_file
from small_runs import ShareOfLowBytes, make_module, sgd, weights
from tiny import LLAMA, tiny_policy

from lit_grpo import AdditionData, PromptData, Trainer, export_checkpoint
from lit_grpo.callbacks import (
    Checkpoints,
)
from lit_grpo.objective import AdvantageConfig, KLTerm, Objective
from lit_grpo.objective.advantages import center
from lit_grpo.policy import LoRA, Policy
from lit_grpo.rewards import FunctionReward, LengthReward, MathReward, Reward
from lit_grpo.rollout import EngineFailed, HFEngine, Sampling
from lit_grpo.runs.checkpoints.files import read_manifest
from lit_grpo.runs.files.events import read_events
from lit_grpo.runs.report.history import are_stages, load_runs
from lit_grpo.stopping import stop_run
from lit_grpo.training import Evaluation, OutagePolicy, SFTModule
from lit_grpo.types import StopReason, UserError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole")
    trainer, module = train(run_dir)
    return run_dir, trainer, module


def test_it_writes_the_files_of_a_run(whole):
    run_dir, trainer, _ = whole
    assert trainer.stop_reason is None
    assert len((run_dir / "metrics.csv").read_text().splitlines()) == 4
    assert (run_dir / "final/model.safetensors").exists()
    assert len(list((run_dir / "completions").iterdir())) == 3
    assert "done after optimizer step 3: max_steps is reached" in (run_dir / "run.log").read_text()


def test_a_run_directory_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer, _ = train(Path("~/runs/one"), max_steps=1)
    assert trainer.run_dir == tmp_path / "runs/one"
    assert (tmp_path / "runs/one/final/model.safetensors").exists()
    assert len(list((tmp_path / "runs/one/completions").iterdir())) == 1
    train(Path("~/runs/one"), max_steps=2, ckpt_path="~/runs/one/checkpoints/last.ckpt")
    policy = Policy(architecture=LLAMA)
    export_checkpoint("~/runs/one/checkpoints/last.ckpt", "~/model", policy=policy)
    assert (tmp_path / "model/model.safetensors").exists()


class Wandering(Reward):
    """Leave for another directory, as code under test may."""

    def __init__(self, directory):
        super().__init__()
        self.directory = directory

    def score(self, prompt, completion):
        os.chdir(self.directory)
        return float(len(completion.text) % 2)


def test_a_run_stays_in_its_directory_wherever_a_reward_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    settings = {"accelerator": "cpu", "enable_progress_bar": False}
    trainer = Trainer("runs/a", max_steps=2, **settings)
    module = make_module(rewards=[Wandering(tmp_path / "other")], group_size=2)
    os.chdir("other")  # as a notebook may, before it trains
    trainer.fit(module, AdditionData(1, validation_size=0, train_size=8, prompts_per_step=2))
    close_logs()
    assert not list((tmp_path / "other").iterdir())
    run = tmp_path / "runs" / "a"
    assert len(list((run / "completions").iterdir())) == len(pd.read_csv(run / "metrics.csv")) == 2
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert (run / "final" / "model.safetensors").exists()


class Interrupts(Callback):
    def on_train_batch_end(self, *_):
        raise KeyboardInterrupt


def test_an_interrupt_is_raised_and_does_not_end_the_process(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Interrupts())
    assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    resumed, _ = train(tmp_path, ckpt_path="auto")
    assert resumed.stop_reason is None


@pytest.mark.parametrize("call", ["validate", "test"])
def test_an_interrupt_of_an_evaluation_is_raised_too(call, tmp_path, ctrl_c):
    signals = [signal.SIGINT]  # a second one could come after the call

    class Interrupted(ShareOfLowBytes):
        def score(self, prompt, completion):
            while signals:
                signal.raise_signal(signals.pop())
            return 1.0

    module = make_module(evaluation=Evaluation(accuracy=Interrupted()))
    data = AdditionData(1, train_size=4, validation_size=2, prompts_per_step=2)
    with pytest.raises(KeyboardInterrupt):
        getattr(quiet_trainer(tmp_path), call)(module, data)


@pytest.mark.parametrize("call", ["fit", "validate", "test"])
def test_a_checkpoint_is_named_by_a_text_or_a_path(tmp_path, call):
    trainer = Trainer(tmp_path, max_steps=1)
    with pytest.raises(UserError, match="ckpt_path must be of type str or Path, got True"):
        getattr(trainer, call)(make_module(), PromptData(), ckpt_path=True)


def test_predict_says_what_to_call(tmp_path):
    with pytest.raises(UserError, match="predict is not supported. Call validate or test"):
        Trainer(tmp_path, max_steps=1).predict(make_module(), PromptData())


def test_a_stopped_run_says_why_and_resumes_to_the_undisturbed_one(whole, tmp_path):
    stopped, _ = train(tmp_path, StopAfter(1))
    assert stopped.stop_reason.message == "enough for now"
    assert (stopped.exit_code, whole[1].exit_code) == (20, 0)
    assert not (tmp_path / "final").exists()
    resumed, module = train(tmp_path, ckpt_path="last")
    assert resumed.stop_reason is None
    assert "the code of reward" not in (tmp_path / "run.log").read_text()
    for name, expected in weights(whole[2]).items():
        assert torch.equal(weights(module)[name], expected), name


class StopBefore(Callback):
    """Ends a run in its first step, which is left undone."""

    def on_train_batch_start(self, trainer, *_):
        stop_run(trainer, StopReason(exit_code=20, message="at once", is_step_unfinished=True))
        return -1


def test_a_resume_from_before_the_first_step_is_counted(tmp_path):
    train(tmp_path, StopBefore())
    assert not (tmp_path / "metrics.csv").exists()
    train(tmp_path, StopBefore(), ckpt_path="last")
    train(tmp_path, ckpt_path="last", max_steps=1)
    kinds = [(one.kind, one.step) for one in read_events(tmp_path) if one.kind != "warning"]
    resumed = [("resume", 0), ("stop", 0), ("resume", 0), ("done", 1)]
    assert kinds == [("start", 0), ("stop", 0), *resumed]
    assert pd.read_csv(tmp_path / "metrics.csv")["resumes"].tolist() == [2]


def test_the_same_trainer_goes_on_after_a_stop(tmp_path):
    trainer, module = train(tmp_path, StopAfter(1))
    data = AdditionData(1, train_size=8, validation_size=2, prompts_per_step=2)
    trainer.fit(module, data, ckpt_path="last", allow_changes=True)
    close_logs()
    assert trainer.stop_reason is None
    assert trainer.global_step == 3
    assert (tmp_path / "final").is_dir()
    assert (tmp_path / "run.log").read_text().strip().endswith("max_steps is reached")
    assert trainer.limit_val_batches == 1.0
    assert pd.read_csv(tmp_path / "metrics.csv")["resumes"].tolist() == [0, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group_size": 4}, "model.group_size: 2 -> 4"),
        ({"seed": 1}, "model.seed: 0 -> 1"),
        (
            {"policy": {"reasoning_tags": None}},
            "model.policy.reasoning_tags: ['<think>', '</think>'] -> None",
        ),
        ({"sampling": Sampling(max_tokens=9)}, "model.sampling.max_tokens: 8 -> 9"),
        ({"objective": Objective(clip_high=0.3)}, "model.objective.clip_high: 0.2 -> 0.3"),
        (
            {"rewards": [LengthReward(start_tokens=2, end_tokens=8)]},
            "model.rewards: ['share_of_low_bytes'] -> ['length']",
        ),
        ({"data": {"train_size": 10}}, "data.rows: 8 (checksum"),
        ({"data": {"prompts_per_step": 4}}, "data.prompts_per_step: 2 -> 4"),
        ({"data": {"seed": 5}}, "data.seed: 0 -> 5"),
    ],
)
def test_another_run_is_not_resumed_unless_that_is_wanted(tmp_path, changed, message):
    train(tmp_path, StopAfter(1))
    with pytest.raises(UserError) as error:
        train(tmp_path, ckpt_path="last", changed=changed)
    assert message in str(error.value)
    assert "allow_changes=True" in str(error.value)
    trainer, _ = train(tmp_path, ckpt_path="last", changed=changed, allow_changes=True)
    assert trainer.global_step == 3
    trainer, _ = train(tmp_path, ckpt_path="last", changed=changed, max_steps=4)
    assert trainer.global_step == 4


def test_a_start_from_no_checkpoint_is_no_resume_though_the_directory_has_an_earlier_attempt(
    tmp_path,
):
    class Failing(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            raise ValueError("oops")

    with pytest.raises(ValueError, match="oops"):
        train(tmp_path, Failing(), max_steps=1)
    train(tmp_path, max_steps=1)
    train(tmp_path, max_steps=2, ckpt_path="last")
    assert pd.read_csv(tmp_path / "metrics.csv")["resumes"].tolist() == [0, 1]


@pytest.mark.slow
def test_what_was_allowed_goes_on_though_the_run_was_killed_before_it_saved(tmp_path):
    train(tmp_path, StopAfter(1))
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "kept")
    changed = {"group_size": 4, "optimizer": torch.optim.Adagrad, "data": {"train_size": 10}}
    _, allowed = train(tmp_path, ckpt_path="last", changed=changed, allow_changes=True)

    def lose_what_was_saved_since() -> None:
        shutil.rmtree(tmp_path / "checkpoints")
        shutil.copytree(tmp_path / "kept", tmp_path / "checkpoints")

    lose_what_was_saved_since()
    with pytest.raises(UserError, match="model.group_size: 2 -> 6"):
        train(tmp_path, ckpt_path="last", changed=changed | {"group_size": 6})
    with pytest.raises(UserError, match="data.rows: 8"):
        train(tmp_path, ckpt_path="last", changed=changed | {"data": {"train_size": 12}})
    _, again = train(tmp_path, ckpt_path="last", changed=changed)
    torch.testing.assert_close(weights(again), weights(allowed), rtol=0, atol=0)
    told = [sorted(one.changes) for one in read_events(tmp_path) if one.kind == "resume"]
    assert told[0] == told[1]
    assert "model.group_size: 2 -> 4" in told[0]
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "left_behind")
    lose_what_was_saved_since()
    train(tmp_path, ckpt_path="last")  # with those of the checkpoint
    with pytest.raises(UserError, match="model.group_size: 4 -> 2"):
        train(tmp_path, ckpt_path=tmp_path / "left_behind/step_000003.ckpt", max_steps=5)


def test_what_a_run_has_allowed_holds_for_its_own_checkpoints_only(tmp_path):
    other, own = {"group_size": 4}, tmp_path / "own"
    train(tmp_path / "other", max_steps=1, changed=other)
    train(own, max_steps=2)
    train(own, ckpt_path="last")
    saved = weights_of(own)
    with pytest.raises(UserError, match="model.group_size: 4 -> 2"):
        train(own, max_steps=4, ckpt_path=tmp_path / "other/checkpoints/last.ckpt")
    assert weights_of(own) == saved


@pytest.mark.slow
def test_checkpoints_on_another_disk_are_those_of_the_run(tmp_path):
    run_dir, disk, kept = (tmp_path / name for name in ("run", "disk", "kept"))
    disk.mkdir()
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(disk)
    train(run_dir, StopAfter(1))
    shutil.copytree(disk, kept, symlinks=True)
    changed = {"group_size": 4}
    train(run_dir, ckpt_path="last", changed=changed, allow_changes=True)
    shutil.rmtree(disk)
    shutil.copytree(kept, disk, symlinks=True)
    train(run_dir, ckpt_path="last", changed=changed)


def weights_of(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints/last.ckpt").read_bytes()


@pytest.mark.slow
def test_a_state_that_begins_anew_is_allowed_once(tmp_path):
    plain, amsgrad = (
        {"optimizer": partial(torch.optim.AdamW, lr=1e-3, amsgrad=is_on)} for is_on in (False, True)
    )
    train(tmp_path, StopAfter(1), changed=plain)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "kept")
    with pytest.raises(UserError, match=r"does not have: model.optimizer.amsgrad: False -> True"):
        train(tmp_path, ckpt_path="last", changed=amsgrad)
    _, allowed = train(tmp_path, ckpt_path="last", changed=amsgrad, allow_changes=True)
    shutil.rmtree(tmp_path / "checkpoints")
    shutil.copytree(tmp_path / "kept", tmp_path / "checkpoints")
    _, again = train(tmp_path, ckpt_path="last", changed=amsgrad)
    torch.testing.assert_close(weights(again), weights(allowed), rtol=0, atol=0)
    train(tmp_path, ckpt_path="last", changed=amsgrad, max_steps=4)  # its checkpoints have it


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_weights_and_ends_with_their_average(tmp_path):
    def average() -> EMAWeightAveraging:
        return EMAWeightAveraging(decay=0.5)

    _, whole = train(tmp_path / "whole", average(), max_steps=4)
    train(tmp_path / "part", average(), max_steps=2)
    _, resumed = train(tmp_path / "part", average(), max_steps=4, ckpt_path="last")
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    final = load_file(tmp_path / "whole" / "final" / "model.safetensors")
    _, plain = train(tmp_path / "plain", max_steps=4)
    saved = torch.load(tmp_path / "whole/checkpoints/last.ckpt", weights_only=True)
    for name, weight in weights(plain).items():
        key = f"policy.model.{name}"
        assert saved["current_model_state"][key].equal(weight)
        assert saved["state_dict"][key].equal(final[name])
    assert any(not final[name].equal(weight) for name, weight in weights(plain).items())


@pytest.mark.slow
def test_a_run_that_no_longer_averages_is_refused_or_goes_on_with_its_own_weights(tmp_path):
    train(tmp_path / "part", EMAWeightAveraging(decay=0.5), max_steps=2)
    with pytest.raises(UserError, match="the run averages its weights, and no callback does so"):
        train(tmp_path / "part", max_steps=4, ckpt_path="last")
    _, allowed = train(tmp_path / "part", max_steps=4, ckpt_path="last", allow_changes=True)
    _, whole = train(tmp_path / "whole", max_steps=4)
    torch.testing.assert_close(weights(allowed), weights(whole), rtol=0, atol=0)


def test_what_changes_at_a_resume_is_in_the_log_the_events_and_the_card(tmp_path, caplog):
    caplog.set_level("INFO")
    train(tmp_path, StopAfter(1))
    faster = partial(torch.optim.SGD, lr=0.5)
    changed = {"group_size": 4, "optimizer": faster, "data": {"prompts_per_step": 4}}
    train(tmp_path, StopAfter(2), ckpt_path="last", changed=changed, allow_changes=True)
    changed |= {"optimizer": partial(torch.optim.RMSprop, lr=1.0), "lr_schedule": "linear"}
    with pytest.raises(UserError, match="different run: model.optimizer: SGD -> RMSprop. Put"):
        train(tmp_path, ckpt_path="last", changed=changed)
    train(tmp_path, ckpt_path="last", changed=changed, allow_changes=True)
    first = [
        "data.prompts_per_step: 2 -> 4",
        "model.group_size: 2 -> 4",
        "model.optimizer.lr: 1.0 -> 0.5",
    ]
    second = [
        "model.lr_schedule: constant -> linear",
        "model.optimizer.lr: 0.5 -> 1.0",
        "model.optimizer: SGD -> RMSprop",
    ]
    events = [one for one in read_events(tmp_path) if one.kind == "resume"]
    assert [sorted(one.changes) for one in events] == [first, second]
    told = [one for one in caplog.messages if one.startswith("changed for this part of the run")]
    assert [one.partition(": ")[2] for one in told] == [*events[0].changes, *events[1].changes]
    card = (tmp_path / "final/README.md").read_text()
    assert (
        "model.group_size 2 -> 4 after step 1; data.prompts_per_step 2 -> 4 after step 1; " in card
    )
    assert "model.optimizer SGD -> RMSprop after step 2; " in card
    assert "model.optimizer.lr 0.5 -> 1.0 after step 2\n" in card


def test_a_module_that_goes_on_again_tells_only_what_has_changed_since(tmp_path):
    _, module = train(tmp_path, max_steps=1)
    data = AdditionData(1, train_size=8, validation_size=0, prompts_per_step=2)
    settings = {"accelerator": "cpu", "enable_progress_bar": False}
    for steps, lr in ((2, 0.5), (3, 0.25), (4, 0.25)):
        module.make_optimizer = partial(torch.optim.SGD, lr=lr)
        Trainer(tmp_path, max_steps=steps, **settings).fit(module, data, ckpt_path="last")
        close_logs()
    told = [one.changes for one in read_events(tmp_path) if one.kind == "resume"]
    of_lr = [[f"model.optimizer.lr: {change}"] for change in ("1.0 -> 0.5", "0.5 -> 0.25")]
    assert told == [*of_lr, []]


@pytest.mark.parametrize("minimum", [{"min_steps": 3}, {"min_epochs": 2}])
def test_a_stop_ends_a_run_before_the_least_number_of_its_steps(tmp_path, minimum):
    trainer, _ = train(tmp_path, StopAfter(1), **minimum)
    assert trainer.global_step == 1
    assert {name: getattr(trainer, name) for name in minimum} == minimum


class Average(ShareOfLowBytes):
    """A reward less a moving average of its values, which it keeps as NumPy counts it."""

    average = np.float64(0)

    def score(self, prompt, completion):
        value = super().score(prompt, completion)
        self.average = np.mean([self.average, value])
        return float(value)

    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


def test_numbers_of_numpy_in_settings_and_states_are_resumed_from(tmp_path):
    changed = {
        "rewards": [Average()],
        "optimizer": partial(torch.optim.AdamW, lr=np.linspace(1e-4, 1e-3, 4)[2]),
    }
    train(tmp_path, StopAfter(1), changed=changed)
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert 0 < saved["rewards"]["average"]["average"] < 1
    train(tmp_path, ckpt_path="last", changed=changed, max_steps=2)
    assert "lr: 0.0007" in (tmp_path / "final/README.md").read_text()


class Relative(Average):
    """Values above the average. Some scores, of the four in each step, may end the run."""

    def __init__(self, end=None, ending=()):
        self.end, self.ending, self.num_scored = end, ending, 0

    def score(self, prompt, completion):
        value = super().score(prompt, completion) - self.average
        self.num_scored += 1
        if self.num_scored in self.ending:
            self.end()
        return value


def fail():
    raise TypeError("a bug")


def send(signum):
    os.kill(os.getpid(), signum)
    time.sleep(2.5)  # the run asks every second whether to end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "ending"),
    [
        (partial(send, signal.SIGINT), [6]),
        (partial(send, signal.SIGTERM), [6]),
        (fail, range(5, 9)),
    ],
)
def test_a_step_that_is_left_undone_leaves_no_trace_in_the_state_of_a_reward(tmp_path, end, ending):
    _, whole = train(tmp_path / "whole", changed={"rewards": [Relative()]})
    trainer, ended = train(tmp_path / "run", changed={"rewards": [Relative(end, ending)]})
    assert trainer.stop_reason is not None
    assert ended.rollout_step == 1
    _, resumed = train(tmp_path / "run", ckpt_path="last", changed={"rewards": [Relative()]})
    assert resumed.rewards.rewards[0].average == whole.rewards.rewards[0].average
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


class Growing:
    """A surrogate whose losses grow with every call."""

    num_calls = 0

    def __call__(self, inputs, objective):
        self.num_calls += 1
        return -inputs.ratio * inputs.advantages * (1 + self.num_calls)

    def state_dict(self):
        return {"num_calls": self.num_calls}

    def load_state_dict(self, state):
        self.num_calls = state["num_calls"]


@pytest.mark.slow
def test_a_function_of_the_objective_may_have_a_state(tmp_path):
    def growing():
        return {"objective": Objective(surrogate=Growing())}

    _, whole = train(tmp_path / "whole", changed=growing())
    train(tmp_path / "run", StopAfter(2), changed=growing())
    _, resumed = train(tmp_path / "run", ckpt_path="last", changed=growing())
    assert resumed.objective.surrogate.num_calls == whole.objective.surrogate.num_calls > 2
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_another_policy_does_not_resume_a_run_unless_that_is_wanted(tmp_path, lora):
    paths = {seed: str(tmp_path / f"model{seed}") for seed in (1, 2)}
    for seed, path in paths.items():
        tiny_policy(seed=seed).save_pretrained(path)

    def of(seed):
        return {"policy": {"path": paths[seed], "architecture": None, "lora": lora}}

    train(tmp_path / "run", StopAfter(1), changed=of(1))
    with pytest.raises(UserError, match=f"began with, {paths[1]}, got {paths[2]}, which has other"):
        train(tmp_path / "run", ckpt_path="last", changed=of(2))
    trainer, _ = train(tmp_path / "run", ckpt_path="last", changed=of(2), allow_changes=True)
    assert trainer.global_step == 3


def test_a_file_in_place_of_a_run_directory_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run_dir must be a directory.* \(it is a file\)"):
        Trainer(tmp_path / "file")


@pytest.mark.slow
@pytest.mark.parametrize("began_with_path", [False, True])
def test_random_weights_and_a_model_do_not_resume_each_others_runs(tmp_path, began_with_path):
    path = str(tmp_path / "model")
    tiny_policy(seed=1).save_pretrained(path)
    policies = [{"policy": {}}, {"policy": {"path": path, "architecture": None}}]
    policies = [one | {"objective": Objective(kl=KLTerm(coef=0.1))} for one in policies]
    began, other = reversed(policies) if began_with_path else policies
    train(tmp_path / "run", StopAfter(1), changed=began)
    what = ["random weights (architecture)", f"the model {path}"]
    was, got = reversed(what) if began_with_path else what
    with pytest.raises(UserError, match=re.escape(f"began with, {was}, got {got} (a reference")):
        train(tmp_path / "run", ckpt_path="last", changed=other)
    trainer, _ = train(tmp_path / "run", ckpt_path="last", changed=began)
    assert trainer.global_step == 3


def test_a_policy_that_an_earlier_run_trained_on_other_prompts_is_warned_of(
    whole, tmp_path, caplog
):
    shutil.copytree(whole[0] / "final", tmp_path / "warm/final")
    shutil.copyfile(whole[0] / "metrics.csv", tmp_path / "warm/metrics.csv")
    policy = Policy(str(tmp_path / "warm/final"))  # of plain prompts, trained in Python
    module = SFTModule(policy, optimizer=sgd, sampling=Sampling(max_tokens=8))
    rows = [{"prompt": "1+1=", "answer": "2"}]
    data = PromptData(rows, prompts_per_step=1, template="{{ prompt }}")
    trainer = Trainer(tmp_path / "run", max_steps=1, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(module, data)
    close_logs()
    assert "of this run (data.template: None -> '{{ prompt }}'), so" in caplog.text
    assert are_stages(load_runs([tmp_path / "run", tmp_path / "warm"]))


def test_a_reward_whose_code_has_changed_is_warned_of_at_a_resume(tmp_path, caplog):
    def rewards_of(value):
        path = tmp_path / "my_reward.py"
        path.write_text(
            f"def even(completions, **columns):\n    return [{value}] * len(completions)"
        )
        sys.modules.pop(f"my_reward at {path.resolve()}", None)  # as in another process
        return {"rewards": [ShareOfLowBytes(), FunctionReward(f"{path}:even")]}

    train(tmp_path / "run", max_steps=1, changed=rewards_of(0.5))
    train(tmp_path / "run", max_steps=2, changed=rewards_of(0.25), ckpt_path="last")
    assert "the code of reward 'even' is not that of the run so far" in caplog.text


def signed(sign):
    def surrogate(inputs, objective):
        return -sign * inputs.ratio * inputs.advantages

    return surrogate


def signs(table, scale=1.0):
    return scale * center(table.rewards, table.valid).sign()


class Share:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, inputs, objective):
        return -self.factor * (inputs.ratio * inputs.advantages).sum() / inputs.counts.tokens


def rewarding(value):
    def even(completions, **columns):
        return [value * (len(one) % 2) for one in completions]

    return even


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda sign: {"objective": Objective(surrogate=signed(sign))},
            "model.objective.surrogate.settings: {'sign': 1.0} -> {'sign': -1.0}",
        ),
        (
            lambda factor: {"objective": Objective(function=Share(factor))},
            "model.objective.function.settings: {'factor': 1.0} -> {'factor': -1.0}",
        ),
        (
            lambda scale: {"advantage": AdvantageConfig(function=partial(signs, scale=scale))},
            "model.advantage.function.settings: {'function': 'signs', 'scale': 1.0} -> ",
        ),
        (
            lambda value: {"rewards": [rewarding(value)]},
            "model.rewards.even.settings: {'value': 1.0} -> {'value': -1.0}",
        ),
    ],
    ids=["closure", "object", "partial", "reward"],
)
def test_a_function_that_carries_other_values_is_a_change_that_is_logged(tmp_path, made, message):
    train(tmp_path, max_steps=1, changed=made(1.0))
    train(tmp_path, max_steps=2, ckpt_path="last", changed=made(1.0))
    log = tmp_path / "run.log"
    assert "is not that of the run so far" not in log.read_text()
    assert "changed for this part of the run" not in log.read_text()
    train(tmp_path, max_steps=3, ckpt_path="last", changed=made(-1.0))
    assert f"changed for this part of the run: {message}" in log.read_text()


def test_an_objective_whose_code_has_changed_is_warned_of_at_a_resume(tmp_path, caplog):
    def lambdas():
        first = Objective(surrogate=lambda inputs, objective: -inputs.ratio * inputs.advantages)
        other = Objective(surrogate=lambda inputs, objective: inputs.ratio * inputs.advantages)
        return {"objective": first}, {"objective": other}

    train(tmp_path, max_steps=1, changed=lambdas()[0])
    train(tmp_path, max_steps=2, changed=lambdas()[0], ckpt_path="last")
    what = "the code of model.objective.surrogate is not that of the run so far"
    assert what not in caplog.text
    train(tmp_path, max_steps=3, changed=lambdas()[1], ckpt_path="last")
    assert what in caplog.text


def test_a_checkpoint_that_does_not_describe_functions_is_resumed(tmp_path, caplog):
    train(tmp_path, max_steps=1, changed={"objective": Objective(surrogate=signed(1.0))})
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    saved["run_settings"] = {
        key: value
        for key, value in saved["run_settings"].items()
        if key != "objective.code" and not key.endswith(".settings")
    }
    earlier = tmp_path / "earlier.ckpt"
    torch.save(saved, earlier)
    changed = {"objective": Objective(surrogate=signed(-1.0))}
    trainer, _ = train(tmp_path / "other", max_steps=2, ckpt_path=earlier, changed=changed)
    assert trainer.global_step == 2
    assert "is not that of the run so far" not in caplog.text


def test_a_term_for_which_the_checkpoint_has_no_reference_is_refused(tmp_path):
    train(tmp_path, StopAfter(1))
    changed = {"objective": Objective(kl=KLTerm(coef=0.1))}
    with pytest.raises(UserError, match="kl.coef must stay 0 when this run is resumed"):
        train(tmp_path, ckpt_path="last", changed=changed, allow_changes=True)


def test_a_module_that_was_trained_starts_no_other_run(tmp_path):
    _, module = train(tmp_path / "one")
    other = quiet_trainer(tmp_path / "two")
    with pytest.raises(
        UserError, match=rf"this module was trained in {tmp_path / 'one'}"
    ) as refused:
        other.fit(module, AdditionData(1, train_size=12, validation_size=0, prompts_per_step=4))
    assert f"use the policy {tmp_path / 'one'}/final" in str(refused.value)
    assert not (tmp_path / "two").exists()


def quiet_trainer(run_dir, **settings):
    return Trainer(run_dir, accelerator="cpu", enable_progress_bar=False, **settings)


def accuracies(run_dir):
    rows = pd.read_csv(run_dir / "metrics.csv")
    return dict(rows.set_index("step")["val/accuracy"].dropna())


def test_an_evaluation_takes_the_checkpoint_of_its_run_and_leaves_its_files_alone(tmp_path):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    data = PromptData(train=rows[:4], validation=rows[4:], test=rows[4:], prompts_per_step=2)
    files = [tmp_path / name for name in ("metrics.csv", "events.jsonl")]

    def module():
        return make_module(group_size=2, evaluation=Evaluation(accuracy=ShareOfLowBytes()))

    def accuracy(found):
        return next(value for name, value in found[0].items() if name.endswith("/accuracy"))

    trainer = quiet_trainer(tmp_path, max_steps=2, val_check_interval=1)
    baseline = accuracy(trainer.validate(module(), data))
    trainer.fit(trained := module(), data)
    before, *_, last = of_run = list(accuracies(tmp_path).values())
    assert list(accuracies(tmp_path)) == [-1, 0, 1]
    assert len(set(of_run)) == 3
    assert before == pytest.approx(baseline)
    written = [path.read_bytes() for path in files]
    evaluated = [
        trainer.validate(trained, data),
        trainer.validate(),  # what it has trained
        trainer.test(ckpt_path="last"),
        quiet_trainer(tmp_path).validate(module(), data, ckpt_path="last"),
        quiet_trainer(tmp_path).test(module(), data, ckpt_path="last"),
    ]
    for name in ("last", "auto"):
        with pytest.raises(UserError, match="/none has no checkpoint to evaluate"):
            quiet_trainer(tmp_path / "none").validate(module(), data, ckpt_path=name)
    close_logs()
    assert [accuracy(one) for one in evaluated] == pytest.approx([last] * len(evaluated))
    assert [path.read_bytes() for path in files] == written


@pytest.mark.slow
def test_other_validation_rows_are_said_and_the_best_starts_anew(tmp_path, caplog):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
    best = tmp_path / "checkpoints/best.ckpt"

    def validated(max_steps, validation, **options):
        saving = Checkpoints(dirpath=str(best.parent), monitor="val/accuracy")
        settings = {"accelerator": "cpu", "enable_progress_bar": False, "val_check_interval": 1}
        trainer = Trainer(tmp_path, max_steps=max_steps, callbacks=[saving], **settings)
        module = make_module(group_size=2, rewards=[ShareOfLowBytes(), MathReward(weight=0)])
        data = PromptData(train=rows, validation=validation, prompts_per_step=2)
        trainer.fit(module, data, **options)
        close_logs()
        return read_manifest(best).rollout_step

    said = "the validation rows are not those of the run so far"
    held_out = [{"prompt": "9+9=", "answer": "18", "difficulty": 1}]
    assert validated(1, held_out) == 1
    assert validated(2, held_out, ckpt_path="last") == 1  # nothing is better than 0 right
    assert said not in caplog.text
    held_out[0]["difficulty"] = 2
    assert validated(3, held_out, ckpt_path="last") == 3
    assert said in caplog.text


class OwnEngine(HFEngine):
    pass


def test_how_it_is_computed_may_change_at_a_resume(tmp_path):
    train(tmp_path, StopAfter(1))
    changed = {
        "update": {"max_tokens_per_micro_batch": 64},
        "lr_schedule": "linear",
        "warmup_steps": 1,
        "engine": OwnEngine(),
        "evaluation": Evaluation(before_training=False, num_samples=2),
        "outage": OutagePolicy(max_absent_fraction=0.25),
        "policy": {"packing": False},
    }
    trainer, _ = train(tmp_path, ckpt_path="last", changed=changed)
    assert trainer.global_step == 3
    (resumed,) = (one for one in read_events(tmp_path) if one.kind == "resume")
    assert sorted(resumed.changes) == [
        "model.engine: HFEngine -> OwnEngine",
        "model.evaluation.num_samples: 0 -> 2",
        "model.lr_schedule: constant -> linear",
        "model.outage.max_absent_fraction: 0.5 -> 0.25",
        "model.policy.packing: True -> False",
        "model.update.max_tokens_per_micro_batch: 16384 -> 64",
        "model.warmup_steps: 0 -> 1",
    ]


class FailAt(Callback):
    """Fail in a rollout step, as a process may that is killed."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if pl_module.rollout_step == self.step:
            raise RuntimeError("killed")


def go_back(run_dir, fails_at) -> list[str]:
    """Go back to the first checkpoint of four steps, and fail; return the checkpoints."""
    train(run_dir, max_steps=4)
    checkpoints = run_dir / "checkpoints"
    assert sorted(one.name for one in checkpoints.glob("step*.ckpt")) == [
        "step_000001.ckpt",
        "step_000004.ckpt",
    ]
    with pytest.raises(RuntimeError, match="killed"):
        train(run_dir, FailAt(fails_at), max_steps=6, ckpt_path=checkpoints / "step_000001.ckpt")
    return sorted(one.name for one in checkpoints.glob("step*.ckpt"))


@pytest.mark.slow
def test_a_run_that_has_gone_back_goes_on_from_there_and_not_from_what_it_left(tmp_path):
    assert go_back(tmp_path, fails_at=3) == ["step_000001.ckpt", "step_000002.ckpt"]
    trainer, _ = train(tmp_path, max_steps=6, ckpt_path="last")
    assert read_events(tmp_path)[-2].step == 2
    metrics = pd.read_csv(tmp_path / "metrics.csv")
    assert metrics["step"].tolist() == [*range(6)]
    assert metrics["resumes"].tolist() == [0, 1, 2, 2, 2, 2]


@pytest.mark.slow
def test_a_run_that_has_gone_back_and_took_no_step_still_has_what_it_would_replace(tmp_path):
    assert go_back(tmp_path, fails_at=1) == ["step_000001.ckpt", "step_000004.ckpt"]
    train(tmp_path, max_steps=6, ckpt_path="last")
    assert [one.step for one in read_events(tmp_path) if one.kind == "resume"] == [1, 1]


def test_a_directory_that_holds_a_run_is_refused(whole):
    with pytest.raises(UserError, match="already holds a run"):
        train(whole[0])


class NeverSamples(HFEngine):
    def generate(self, prompts, group_size, sampling, *, seed):
        raise EngineFailed("no server is left")


def test_an_error_has_the_exit_code_that_the_command_line_would_return(tmp_path):
    module = make_module(group_size=2, engine=NeverSamples())
    data = AdditionData(1, train_size=8, validation_size=2, prompts_per_step=2)
    trainer = Trainer(tmp_path, max_steps=1, accelerator="cpu", enable_progress_bar=False)
    module.evaluation.before_training = True
    with pytest.raises(EngineFailed, match="no server is left"):
        trainer.fit(module, data)
    close_logs()
    assert (trainer.stop_reason, trainer.exit_code) == (None, 5)
    assert read_events(tmp_path)[-1].cause == "engine_outage"
    with pytest.raises(UserError, match="got an object of type list as the data"):
        trainer.fit(module, [1, 2])
    assert trainer.exit_code == 2


@pytest.mark.slow
def test_a_callback_that_fails_at_the_end_does_not_cost_the_last_checkpoint(whole, tmp_path):
    class Broken(Callback):
        def on_train_end(self, *_):
            raise ZeroDivisionError("of this callback")

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, Broken())
    assert read_manifest((tmp_path / "checkpoints/last.ckpt").resolve()).rollout_step == 3
    assert not (tmp_path / "final").exists()
    _, module = train(tmp_path, ckpt_path="last")
    assert (tmp_path / "final/model.safetensors").exists()
    _, module = train(tmp_path, ckpt_path="last", max_steps=4)
    _, undisturbed = train(tmp_path / "undisturbed", max_steps=4)
    for name, expected in weights(undisturbed).items():
        assert torch.equal(weights(module)[name], expected), name


class Nothing(Reward):
    def score(self, prompt, completion):
        return 0.0


def test_a_run_without_any_reward_is_stopped_although_no_callback_is_listed(tmp_path):
    module = make_module(group_size=2, rewards=[Nothing()])
    data = AdditionData(1, train_size=32, validation_size=0, prompts_per_step=2)
    trainer = Trainer(tmp_path, max_steps=15, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(module, data)
    close_logs()
    assert trainer.exit_code == 3
    alert, stop = (one for one in read_events(tmp_path) if one.cause == "no_reward")
    assert (alert.kind, alert.step, stop.kind, stop.step) == ("alert", 5, "stop", 10)


@pytest.mark.slow
def test_a_trial_of_as_many_steps_as_the_breaker_waits_is_done_and_says_that_it_had_no_reward(
    tmp_path,
):
    module = make_module(group_size=2, rewards=[Nothing()])
    data = AdditionData(1, train_size=32, validation_size=0, prompts_per_step=2)
    trainer = Trainer(tmp_path, max_steps=10, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(module, data)
    close_logs()
    assert trainer.exit_code == 0
    assert (tmp_path / "final/model.safetensors").exists()
    *_, last = (tmp_path / "run.log").read_text().splitlines()
    assert " WARNING " in last
    end = "done after optimizer step 10: max_steps is reached. No reward was earned in any of the "
    assert f"{end}10 rollout steps. Read ten rows of completions/" in last
    events = read_events(tmp_path)
    assert [one.kind for one in events if one.cause == "no_reward"] == ["alert", "alert"]
    assert (events[-1].kind, events[-1].message) == ("done", last[last.index("done after") :])


class Broken(Reward):
    def score(self, prompt, completion):
        return float(prompt.columns["keywords"] == "")


def test_a_bug_in_a_reward_is_said_once_with_advice_for_a_program(tmp_path):
    module = make_module(rewards=[Broken()], group_size=2)
    data = AdditionData(1, train_size=8, validation_size=0, prompts_per_step=2)
    trainer = Trainer(tmp_path, max_steps=1, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(module, data)
    close_logs()
    log = (tmp_path / "run.log").read_text()
    assert "Try the reward without training: call it on a few completions." in log
    assert "RUN" not in log
    assert log.count("KeyError") == 1
    (stop,) = [one for one in read_events(tmp_path) if one.kind == "stop"]
    assert "call it on a few completions" in stop.message


def test_the_guards_find_nothing_in_an_sft_run(tmp_path):
    settings = {"optimizer": sgd, "sampling": Sampling(max_tokens=8)}
    module = SFTModule(Policy(architecture=LLAMA), **settings)
    data = AdditionData(1, train_size=32, validation_size=0, prompts_per_step=2)
    trainer = Trainer(tmp_path, max_steps=3, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(module, data)
    close_logs()
    assert [one.kind for one in read_events(tmp_path)] == ["start", "done"]
    assert "WARNING" not in (tmp_path / "run.log").read_text()


def test_float16_is_refused_although_lightning_would_take_bfloat16_on_a_cpu(tmp_path):
    with pytest.raises(UserError, match="precision must be 32-true or bf16-mixed, got 16-mixed"):
        Trainer(tmp_path, accelerator="cpu", precision="16-mixed")


@pytest.mark.parametrize("limit", ["max_steps", "max_epochs"])
def test_a_run_of_no_steps_says_that_nothing_was_trained(tmp_path, limit):
    train(tmp_path, **({"max_steps": -1} | {limit: 0}))
    log = (tmp_path / "run.log").read_text()
    assert f"Nothing was trained: trainer.{limit} is 0." in log
    assert "validation data" not in log  # there is none


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"callbacks": [Checkpoints]}, r"callbacks must be of type Callback, .*Checkpoints\(...\)"),
        ({"callbacks": "TimingLog"}, r"got 'TimingLog' \(names are .*callbacks.TimingLog\(\)\]"),
        ({"logger": "wandb"}, r"logger must be of type Logger, got 'wandb' .*=WandbLogger\(proj"),
        ({"logger": [{"class_path": "CSVLogger"}]}, "logger must be of type Logger, got {'class"),
        ({"logger": print}, "logger must be of type Logger, got <built-in"),
        ({"max_steps": "2"}, "trainer.max_steps must be an integer, got '2'"),
        ({"max_steps": 2.5}, "trainer.max_steps must be an integer, got 2.5. Set trainer.max"),
        ({"max_epochs": 1.5}, "trainer.max_epochs must be an integer or None, got 1.5"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be >= 1, got 0"),
        ({"val_check_interval": 0}, "val_check_interval must be a whole number >= 1, a fraction"),
        (
            {"val_check_interval": 0.5, "check_val_every_n_epoch": None},
            "it counts steps, across epochs",
        ),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch must be >= 1, got 0"),
    ],
)
def test_a_wrong_setting_of_the_trainer_is_named(tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        Trainer(tmp_path, **settings)


def test_loaders_are_told_where_data_go(tmp_path):
    trainer = quiet_trainer(tmp_path / "run")
    with pytest.raises(UserError, match=r"^train_dataloaders: .* Set train of PromptData\.$"):
        trainer.fit(make_module(), train_dataloaders=[])
    with pytest.raises(UserError, match="got None as the data. Write fit"):
        trainer.fit(make_module())


def test_a_trial_run_writes_nothing_but_its_log_and_says_so(tmp_path):
    trainer = Trainer(tmp_path, fast_dev_run=True, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(make_module(), AdditionData(1, train_size=4, validation_size=2, prompts_per_step=2))
    close_logs()
    assert trainer.global_step == 1
    assert [one.name for one in tmp_path.iterdir()] == ["run.log"]
    assert "of a trial run, which keeps no more than its log" in (tmp_path / "run.log").read_text()


def test_a_second_fit_of_a_trainer_says_that_nothing_is_left_to_do(tmp_path, caplog):
    trainer, module, data = (
        Trainer(tmp_path, max_steps=1),
        make_module(),
        AdditionData(prompts_per_step=2),
    )
    trainer.fit(module, data)
    caplog.set_level("INFO")
    trainer.fit(module, data, ckpt_path="last")
    assert "no step was left to take: raise max_steps (or max_epochs) to go on" in caplog.messages
    close_logs()
