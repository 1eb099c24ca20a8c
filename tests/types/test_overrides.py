"""Hooks of subclasses that leave out what the class does there."""

import functools
from dataclasses import dataclass

import pytest
import torch
from run_logs import close_logs
from small_runs import ShareOfLowBytes
from tiny import LLAMA

from lit_grpo import (
    GRPOModule,
    HFEngine,
    MathReward,
    Policy,
    PromptData,
    Reward,
    Sampling,
    SFTModule,
    Trainer,
)
from lit_grpo.callbacks import (
    Alerts,
    Checkpoints,
    HealthMonitor,
    StallWatchdog,
    ZeroRewardBreaker,
)
from lit_grpo.types import UserError
from lit_grpo.types.overrides import check_made

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(16)]


def make(kind, **others):
    settings = {"rewards": [ShareOfLowBytes()], "policy": Policy(architecture=LLAMA)} | others
    return kind(group_size=2, sampling=Sampling(max_tokens=8), **settings)


def logged(function):
    @functools.wraps(function)
    def wrapped(*arguments):
        return function(*arguments)

    return wrapped


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("on_train_start", r"overrides GRPOModule\.on_train_start.* this in a callback\.$"),
        ("on_save_checkpoint", r"overrides GRPOModule\.on_save_checkpoint"),
        ("on_validation_epoch_end", "Add the call, or"),
        ("validation_step", r"overrides GRPOModule\.validation_step"),
        ("setup", r"overrides GRPOModule\.setup"),
        ("training_step", r"Add the call; a loss of your own is objective=Objective\(function"),
        ("configure_optimizers", r"or pass optimizer=functools\.partial\(torch.optim\.AdamW"),
    ],
)
def test_a_hook_of_a_module_that_leaves_out_that_of_the_class_is_refused(hook, message):
    def replaced(self, *arguments):
        return None

    for function in (replaced, logged(replaced)):
        with pytest.raises(
            UserError, match=rf"^Mine\.{hook} must call super\(\)\.{hook}.*{message}"
        ):
            make(type("Mine", (GRPOModule,), {hook: function}))


def test_it_is_refused_in_every_class_between():
    class Between(SFTModule):
        def on_train_start(self):
            pass

    class Mine(Between):
        def on_train_start(self):
            super().on_train_start()

    with pytest.raises(UserError, match=r"^Between\.on_train_start must call"):
        Mine(Policy(architecture=LLAMA))


class Inner:
    def setup(self, stage):
        pass


class SetsUpAnother(PromptData):
    inner = Inner()

    def setup(self, stage):
        self.inner.setup(stage)


def test_hooks_of_data_are_checked_too_and_a_call_of_another_object_is_none():
    message = r"^SetsUpAnother\.setup must call .*make the rows in rows\(split\)"
    with pytest.raises(UserError, match=message):
        SetsUpAnother(train=ROWS)


def test_a_hook_of_the_class_itself_may_be_chosen():
    class Mixin:
        def on_train_start(self):
            pass

    class Mine(Mixin, GRPOModule):
        on_train_start = GRPOModule.on_train_start

    make(Mine)


def test_hooks_that_call_it_run_and_so_do_those_that_the_class_has_not(tmp_path):
    seen = []

    class Mine(GRPOModule):
        def on_train_start(self):
            super().on_train_start()
            seen.append("start")

        def on_train_epoch_start(self):
            seen.append("epoch")

        def configure_optimizers(self):
            made = GRPOModule.configure_optimizers(self)
            assert isinstance(made["optimizer"], torch.optim.AdamW)
            return made

        def on_train_batch_end(self, outputs, batch, batch_idx):
            def end():
                super(Mine, self).on_train_batch_end(outputs, batch, batch_idx)

            end()
            seen.append("end")

    trainer = Trainer(tmp_path, max_steps=1, accelerator="cpu", enable_progress_bar=False)
    trainer.fit(make(Mine), PromptData(train=ROWS, prompts_per_step=4))
    close_logs()
    assert seen == ["start", "epoch", "end"]


def without_call(kind):
    def __init__(self, *arguments, **settings):  # noqa: N807
        self.arguments = arguments

    return type("Mine", (kind,), {"__init__": __init__})


MUST_CALL = r"^Mine\.__init__ must call super\(\)\.__init__: "
CALLBACKS = [Alerts, Checkpoints, HealthMonitor, StallWatchdog, ZeroRewardBreaker]


@pytest.mark.parametrize("kind", [GRPOModule, SFTModule])
def test_a_module_whose_constructor_leaves_out_that_of_the_class_is_refused(kind, tmp_path):
    trainer = Trainer(tmp_path / "run", max_steps=1, accelerator="cpu")
    with pytest.raises(UserError, match=MUST_CALL):
        trainer.fit(without_call(kind)(), PromptData(train=ROWS, prompts_per_step=4))
    with pytest.raises(UserError, match=MUST_CALL):
        trainer.fit(make(GRPOModule), without_call(PromptData)())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "key"), [(HFEngine, "engine"), (Policy, "policy"), (MathReward, "rewards")]
)
def test_so_is_any_other_part(kind, key):
    part = without_call(kind)(Policy(architecture=LLAMA))
    with pytest.raises(UserError, match=MUST_CALL):
        make(GRPOModule, **{key: [part] if key == "rewards" else part})


@pytest.mark.parametrize("kind", CALLBACKS)
def test_so_is_a_callback(kind, tmp_path):
    with pytest.raises(UserError, match=MUST_CALL):
        Trainer(tmp_path, callbacks=without_call(kind)(), max_steps=1)


class Mixin:
    def __init__(self):
        self.is_mixed = True


class Mixed(Mixin, HFEngine):
    def __init__(self):
        Mixin.__init__(self)
        HFEngine.__init__(self, max_concurrent=2)


@dataclass(eq=False)
class Described(PromptData):
    size: int = 4

    def __post_init__(self):
        super().__init__(train=ROWS[: self.size])


Base = HFEngine


class OfAnotherName(Base):
    def __init__(self):
        self.make()

    def make(self):
        Base.__init__(self)


@pytest.mark.parametrize("made", [Mixed, Described, OfAnotherName, HFEngine, Checkpoints])
def test_it_does_not_matter_which_code_calls_it(made):
    check_made(made())


class LeavesOut(HFEngine):
    def __init__(self):
        pass


class Calls(LeavesOut):
    def __init__(self):
        super().__init__()


class Hidden(Mixin, HFEngine):
    pass


class Unattached(LeavesOut):
    @property
    def policy(self):
        raise RuntimeError("not attached yet")


class Wraps(HFEngine):
    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Calls, r"LeavesOut\.__init__ must call super\(\)\.__init__: .* HFEngine has not run"),
        (Unattached, r"LeavesOut\.__init__ must call"),
        (Hidden, r"Hidden needs an __init__ that calls HFEngine\.__init__: .* of Mixin calls no"),
    ],
)
def test_the_class_is_named_that_leaves_it_out(made, message):
    with pytest.raises(UserError, match=f"^{message}"):
        check_made(made())


def test_an_object_that_forwards_to_another_needs_no_call():
    check_made(Wraps(HFEngine()))


def test_a_reward_needs_no_call():
    class Mine(Reward):
        def __init__(self):
            self.words = ["yes"]

        def score(self, prompt, completion):
            return float(completion.text in self.words)

    make(GRPOModule, rewards=[Mine()])
