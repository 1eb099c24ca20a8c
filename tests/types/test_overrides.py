"""Hooks of subclasses that leave out what the class does there."""

import functools

import pytest
import torch
from run_logs import close_logs
from small_runs import ShareOfLowBytes
from tiny import LLAMA

from lit_grpo import GRPOModule, Policy, PromptData, Sampling, SFTModule, Trainer
from lit_grpo.types import UserError

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(16)]


def make(kind):
    return kind(
        Policy(architecture=LLAMA),
        rewards=[ShareOfLowBytes()],
        group_size=2,
        sampling=Sampling(max_tokens=8),
    )


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
        ("validation_step", r"overrides EvaluatedModule\.validation_step"),
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
