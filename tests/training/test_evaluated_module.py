"""Validations, and how they are cut short, alone and in whole runs."""

import math
import re
from types import SimpleNamespace

import lightning as L
import pytest
from small_runs import PROMPTS, fit, fit_and_evaluate, make_module, make_trainer

from lit_grpo.callbacks import Checkpoints
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.rewards import Reward
from lit_grpo.rollout import EngineFailed, HFEngine
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.training import Evaluation
from lit_grpo.training.evaluated_module import is_cut_short, stops_on_failure
from lit_grpo.training.waiting import StepAbandoned
from lit_grpo.types import StopReason, UserCodeFailed
from lit_grpo.types.errors import EngineBug


def trainer_in(
    function: str = "fit", *, step: int = 3, validating: bool = True, sanity_checking: bool = False
) -> SimpleNamespace:
    """Return the parts of a trainer that are read in a validation."""
    return SimpleNamespace(
        state=SimpleNamespace(fn=function),
        global_step=step,
        validating=validating,
        sanity_checking=sanity_checking,
        is_global_zero=True,
        should_stop=False,
        callbacks=[],
        default_root_dir="nowhere",
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace()),
    )


def fail(trainer, error: Exception) -> StopReason | None:
    """Let a validation fail; return why the run ends."""
    with stops_on_failure(trainer):
        raise error
    return get_stop_reason(trainer)


@pytest.mark.parametrize(
    ("error", "exit_code", "cause"),
    [
        (EngineFailed("no server is left"), ExitCode.ENGINE_FAILED, "engine_outage"),
        (UserCodeFailed("a bug"), ExitCode.CRASHED, "reward_bug"),
        (EngineBug("row 0 twice"), ExitCode.CRASHED, ""),
    ],
    ids=["engine", "reward", "bug of the engine"],
)
def test_a_failure_stops_a_training_which_repeats_the_validation_when_it_is_resumed(
    error, exit_code, cause
):
    reason = fail(trainer := trainer_in(), error)
    assert (reason.exit_code, reason.cause) == (exit_code, cause)
    assert reason.message == f"Stopped at an evaluation: {error}"
    assert (reason.is_step_unfinished, reason.is_validation_unfinished) == (False, True)
    assert trainer.should_stop


def test_a_validation_that_is_abandoned_leaves_no_step_unfinished():
    reason = fail(trainer_in(), StepAbandoned("Ended by a callback."))
    assert reason.message == "Ended by a callback."
    assert (reason.is_step_unfinished, reason.is_validation_unfinished) == (False, True)


def test_an_evaluation_before_training_is_no_validation_of_lightnings_to_repeat():
    reason = fail(trainer_in(validating=False), StepAbandoned("Ended by a callback."))
    assert (reason.is_step_unfinished, reason.is_validation_unfinished) == (False, False)


@pytest.mark.parametrize(
    "settings", [{"function": "validate"}, {"step": 0}, {"sanity_checking": True}], ids=str
)
def test_without_progress_to_save_the_failure_is_raised(settings):
    trainer = trainer_in(**settings)
    with pytest.raises(EngineFailed, match="no server is left"):
        fail(trainer, EngineFailed("no server is left"))
    assert get_stop_reason(trainer) is None


def test_other_errors_and_validations_without_one_pass():
    trainer = trainer_in()
    with pytest.raises(ZeroDivisionError):
        fail(trainer, ZeroDivisionError())
    with stops_on_failure(trainer):
        pass
    assert get_stop_reason(trainer) is None
    assert not trainer.should_stop


def test_only_a_training_cuts_a_validation_short():
    reason = StopReason(exit_code=1, message="enough")
    for function, is_stopped, expected in (
        ("fit", True, True),
        ("fit", False, False),
        ("validate", True, False),
    ):
        trainer = trainer_in(function)
        if is_stopped:
            trainer.stop_reason = reason
        assert is_cut_short(trainer) is expected


class FailsAtEvaluation(HFEngine):
    def generate(self, prompts, group_size, sampling, *, seed):
        if group_size == 1:
            raise EngineFailed("no server is left")
        yield from super().generate(prompts, group_size, sampling, seed=seed)


def test_an_engine_failure_at_an_evaluation_ends_the_run_with_a_checkpoint(tmp_path):
    module = make_module(engine=FailsAtEvaluation())
    trainer, outputs = fit_and_evaluate(module, Checkpoints(dirpath=str(tmp_path)))
    reason = get_stop_reason(trainer)
    assert reason.exit_code == 5
    assert reason.message == "Stopped at an evaluation: no server is left"
    assert len(outputs) == trainer.global_step == 1
    assert (tmp_path / "last.ckpt").exists()


class LeavesRowsOut(HFEngine):
    """Leave out the last row, from some policy version on, of greedy samples or of others."""

    def __init__(self, *, is_greedy: bool, since: int = 0):
        super().__init__()
        self.is_greedy, self.since = is_greedy, since

    def generate(self, prompts, group_size, sampling, *, seed):
        last = len(prompts) * group_size - 1
        is_wrong = sampling.is_greedy == self.is_greedy and self.version >= self.since
        for row, one in super().generate(prompts, group_size, sampling, seed=seed):
            if not (is_wrong and row == last):
                yield row, one


BUG = r"LeavesRowsOut\.generate \(.*\) must yield each .* rows exactly once.* got \d+ of them"


@pytest.mark.parametrize(
    ("is_greedy", "when"), [(True, "Stopped at an evaluation: "), (False, "Stopped: ")]
)
def test_a_bug_of_the_engine_ends_a_training_with_a_checkpoint(tmp_path, is_greedy, when):
    engine = LeavesRowsOut(is_greedy=is_greedy, since=1)
    module = make_module(engine=engine)
    trainer, outputs = fit_and_evaluate(module, Checkpoints(dirpath=str(tmp_path)))
    reason = get_stop_reason(trainer)
    assert (reason.exit_code, reason.cause) == (ExitCode.CRASHED, "")
    assert re.match(f"{when}{__name__}.{BUG}", reason.message)
    assert trainer.global_step == 1
    assert outputs[0] is not None
    assert (tmp_path / "last.ckpt").exists()


def test_a_bug_of_the_engine_without_training_is_an_error():
    module = make_module(engine=LeavesRowsOut(is_greedy=True))
    with pytest.raises(EngineBug, match=BUG):
        make_trainer().validate(module, PromptLoader(PROMPTS, 4, training=False))


def test_an_engine_failure_before_training_or_without_training_is_an_error():
    module = make_module(engine=FailsAtEvaluation())
    module.evaluation.before_training = True
    with pytest.raises(EngineFailed, match="no server is left"):
        fit_and_evaluate(module)
    with pytest.raises(EngineFailed, match="no server is left"):
        make_trainer().validate(module, PromptLoader(PROMPTS, 4, training=False))


def test_an_evaluation_without_scores_logs_nan_instead_of_the_last_accuracy():
    class DownLater(Reward):
        num_calls = 0

        def score(self, prompt, completion):
            self.num_calls += 1
            return 1.0 if self.num_calls <= len(PROMPTS) else None

    class RecordAccuracy(L.Callback):
        def __init__(self):
            self.values = []

        def on_validation_end(self, trainer, pl_module):
            self.values.append(float(trainer.callback_metrics["val/accuracy"]))

    evaluation = Evaluation(accuracy=DownLater(weight=0.5), before_training=False)
    module = make_module(evaluation=evaluation)
    accuracy = RecordAccuracy()
    fit_and_evaluate(module, accuracy)
    assert accuracy.values[0] == 1.0  # the weight makes no difference
    assert math.isnan(accuracy.values[1])


def test_a_run_without_a_last_step_says_at_its_start_how_it_ends(caplog):
    class StopAtOnce(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = True

    caplog.set_level("INFO")
    fit(make_module(), callbacks=[StopAtOnce()], max_steps=-1, max_epochs=-1)
    (said,) = (one for one in caplog.messages if "no last step" in one)
    assert "Ctrl-C ends it" in said
