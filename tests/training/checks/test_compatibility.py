"""Settings that do not fit each other, the model or the data."""

from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch.callbacks import EMAWeightAveraging, Timer
from small_runs import PROMPTS, make_module, make_trainer
from tiny import prompt
from torch.utils.data import DataLoader

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.rollout import HFEngine, Sampling
from lit_grpo.training.checks.compatibility import (
    check_completions_fit,
    check_prompts_fit,
    log_if_endless,
    log_if_none_held_out,
)
from lit_grpo.types import UserError


@pytest.mark.parametrize("as_data", [True, False])
def test_a_loader_without_a_position_is_told_what_to_use(as_data):
    class Plain(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(PROMPTS, batch_size=2)

    data = Plain() if as_data else DataLoader(PROMPTS, batch_size=2)
    with pytest.raises(UserError, match="for a resume, got a DataLoader. Use lit_grpo.PromptData"):
        make_trainer().fit(make_module(), data)


def test_completions_that_leave_no_position_for_a_prompt_are_refused():
    check_completions_fit(64, Sampling(max_tokens=63))
    check_completions_fit(None, Sampling(max_tokens=10**6))
    with pytest.raises(UserError, match="max_tokens must be below the model's 64 positions"):
        check_completions_fit(64, Sampling(max_tokens=64))


def test_prompts_that_leave_no_room_for_a_completion_are_refused():
    sampling = Sampling(max_tokens=32)
    check_prompts_fit(64, sampling, [prompt("x" * 32)])
    check_prompts_fit(None, sampling, [prompt("x" * 1000)])
    with pytest.raises(UserError, match="33 tokens and a completion up to 32, .* 64 positions"):
        check_prompts_fit(64, sampling, [prompt("x"), prompt("x" * 33)])


@pytest.mark.parametrize(
    ("lengths", "remedy"),
    [
        ((1, 33), "Set data.max_prompt_tokens to at most 32 and data.too_long to drop, or lower "
                  "model.sampling.max_tokens to at most 31, or take a model with more positions."),
        ((33, 63), "Lower model.sampling.max_tokens to at most 1, or take a model with more positi"
                   "ons."),
        ((64, 90), "Take a model with more positions."),
    ],
)  # fmt: skip
def test_only_what_can_help_is_advised_for_long_prompts(lengths, remedy):
    with pytest.raises(UserError) as caught:
        check_prompts_fit(64, Sampling(max_tokens=32), [prompt("x" * one) for one in lengths])
    assert str(caught.value).endswith(f" for both. {remedy}")


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "callbacks", "says"),
    [
        (-1, -1, [], True),
        (-1, None, [], True),
        (5, -1, [], False),
        (-1, 2, [], False),
        (0, -1, [], False),
        (-1, -1, [Timer("00:01:00:00")], False),
    ],
)
def test_a_run_that_only_the_user_ends_says_how(max_steps, max_epochs, callbacks, says, caplog):
    caplog.set_level("INFO")
    settings = {"max_steps": max_steps, "max_epochs": max_epochs, "callbacks": callbacks}
    trainer = SimpleNamespace(default_root_dir="runs/my", logs_run=True, **settings)
    log_if_endless(trainer)
    shown = " ".join(caplog.messages)
    assert shown.startswith("the run has no last step: Ctrl-C ends it, without final/") == says
    assert ("set trainer.max_steps" in shown) == says
    assert ("(lit_grpo.export_checkpoint writes a model then)" in shown) == says  # in Python


@pytest.mark.parametrize("has_validation", [False, True])
def test_averages_of_weights_are_refused_where_an_engine_would_keep_them(has_validation):
    class Copies(HFEngine):
        samples_with_policy = False

    module = make_module(engine=Copies())
    trainer = make_trainer(EMAWeightAveraging(), max_steps=1)
    loaders = [PromptLoader(PROMPTS, 4), *([PromptLoader(PROMPTS, 4)] if has_validation else [])]
    if not has_validation:
        trainer.fit(module, *loaders)
        return
    with pytest.raises(UserError, match="EMAWeightAveraging needs an engine .* got Copies"):
        trainer.fit(module, *loaders)


@pytest.mark.parametrize(
    ("interval", "limit", "says"), [(20, 1.0, True), (1.0, 1.0, False), (20, 0, False)]
)
def test_an_interval_without_held_out_rows_is_named(interval, limit, says, caplog):
    caplog.set_level("INFO")
    log_if_none_held_out(SimpleNamespace(val_check_interval=interval, limit_val_batches=limit))
    named = [line.partition(" has no effect")[0] for line in caplog.messages]
    assert named == says * ["no row is held out: trainer.val_check_interval (20)"]
