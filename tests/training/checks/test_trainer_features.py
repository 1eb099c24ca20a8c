"""Features of Lightning's trainer that a run refuses, with what takes their place."""

from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from lightning.pytorch.tuner.tuning import Tuner
from run_logs import close_logs
from small_runs import PROMPTS, make_module
from tiny import LLAMA

from lit_grpo import AdditionData, Policy, Sampling, SFTModule, Trainer
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.training.checks.trainer_features import refuse_automatic
from lit_grpo.types import UserError


def model(*, is_automatic: bool) -> SimpleNamespace:
    return SimpleNamespace(automatic_optimization=is_automatic)


def trainer(batches: int = 1, clip: float | None = None) -> SimpleNamespace:
    return SimpleNamespace(accumulate_grad_batches=batches, gradient_clip_val=clip, callbacks=[])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batches": 2}, r"accumulate_grad_batches must be 1, got 2 .* model\.update\.max_tokens_"),
        ({"clip": 0.5}, r"gradient_clip_val must be null, got 0\.5 .* model\.update\.max_grad_n"),
    ],
)
def test_what_lightning_would_do_with_gradients_is_refused_where_the_module_does_it(
    settings, message
):
    with pytest.raises(UserError, match=message):
        refuse_automatic(trainer(**settings), model(is_automatic=False))
    refuse_automatic(trainer(**settings), model(is_automatic=True))


def test_a_module_with_its_own_steps_takes_a_trainer_without_these_settings():
    refuse_automatic(trainer(clip=0.0), model(is_automatic=False))


QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_clip_val": 0.5}, r"Clipping: model\.update\.max_grad_norm"),
        ({"accumulate_grad_batches": 2}, r"Micro-batches: model\.update"),
        (
            {"callbacks": [GradientAccumulationScheduler({0: 2})]},
            r"^GradientAccumulationScheduler is not .* Micro-batches: model\.update",
        ),
        ({"callbacks": [LearningRateFinder()]}, r"^LearningRateFinder is not .* in the optimizer"),
        ({"callbacks": [BatchSizeFinder()]}, r"^BatchSizeFinder is not .* data\.prompts_per_step"),
    ],
)
def test_a_trainer_of_lightning_itself_is_told_before_anything_is_loaded(settings, message):
    module = make_module()
    trainer = L.Trainer(max_steps=1, enable_checkpointing=False, **QUIET, **settings)
    with pytest.raises(UserError, match=message):
        trainer.fit(module, PromptLoader(PROMPTS, 4))
    assert module.policy.model is None


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_the_tuner_of_lightning_is_refused(kind, tmp_path):
    module = make_module()
    if kind == "sft":
        module = SFTModule(Policy(architecture=LLAMA), sampling=Sampling(max_tokens=8))
    data = AdditionData(1, train_size=8, validation_size=0, prompts_per_step=2)
    trainer = Trainer(tmp_path, max_steps=1, accelerator="cpu", enable_progress_bar=False)
    with pytest.raises(UserError, match="^LearningRateFinder is not supported"):
        Tuner(trainer).lr_find(module, datamodule=data)
    with pytest.raises(UserError, match="^BatchSizeFinder is not supported"):
        Tuner(trainer).scale_batch_size(module, datamodule=data)
    trainer.fit(module, data)  # neither has stayed
    close_logs()
    assert trainer.global_step == 1


def test_further_arguments_of_fit_are_refused_with_their_names(tmp_path):
    trainer = Trainer(tmp_path, accelerator="cpu")
    data = AdditionData(1, train_size=8, validation_size=0)
    with pytest.raises(UserError, match=r"got 1 more\. Pass ckpt_path by its name.* PromptData\("):
        trainer.fit(make_module(), data, "last")
    for other in (L.LightningModule(), SFTModule, data):
        with pytest.raises(UserError, match="^fit takes a module, such as lit_grpo.GRPOModule"):
            trainer.fit(other, [], [])


def test_a_trainer_that_only_evaluates_may_have_settings_of_training(tmp_path):
    trainer = Trainer(tmp_path, accelerator="cpu", gradient_clip_val=1.0)
    data = AdditionData(1, train_size=8, validation_size=2, prompts_per_step=2)
    trainer.validate(make_module(), data)
