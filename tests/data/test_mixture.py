"""A mixture as the data of a training run: several sources, phases, validation, resuming."""

import pytest
from data_runs import Recorder, SaveEverywhere, fit, flat
from small_runs import make_trainer

from lit_grpo.data import AdditionData, MixtureData, MixtureSource, Phase, PromptData
from lit_grpo.types import UserError


def sums(size: int = 10, validation_size: int = 3, digits: int = 1) -> AdditionData:
    return AdditionData(digits, train_size=size, validation_size=validation_size)


def mixture(**settings) -> MixtureData:
    sources = {
        "easy": MixtureSource(data=sums(), weight=0.5),
        "hard": MixtureSource(data=sums(9, 2, digits=2), weight=0.5),
    }
    return MixtureData(**({"sources": sources, "prompts_per_step": 4} | settings))


class Stepping(Recorder):
    """Records what each step was made of."""

    def __init__(self):
        super().__init__()
        self.sources, self.rates = [], []

    def optimizer_steps_per_epoch(self, num_batches):
        return num_batches

    def training_step(self, prompts, batch_idx):
        assert all(prompt.row >= 0 for prompt in prompts)
        self.sources.append(sorted(prompt.source for prompt in prompts))
        return super().training_step(prompts, batch_idx)


RARE = MixtureSource(data=sums(), weight=0.01)
PHASES = [
    Phase(weights={"easy": 3, "hard": 1}, fraction=1),
    Phase(weights={"easy": 0, "hard": 1}, fraction=1),
]


def run(data, *callbacks, checkpoint=None, **choices):
    module = Stepping()
    trainer = make_trainer(*callbacks, **({"num_sanity_val_steps": 0, "max_steps": 8} | choices))
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return module, trainer


def test_a_training_has_each_source_in_every_step_and_validates_on_all():
    module, _ = run(mixture(), max_steps=-1, max_epochs=1)
    assert module.sources == [["easy", "easy", "hard", "hard"]] * 4
    assert len(set(flat(module.evaluated))) == 5


def test_phases_follow_the_optimizer_steps_of_a_training():
    module, _ = run(mixture(curriculum=PHASES))
    assert module.sources == [["easy"] * 3 + ["hard"]] * 4 + [["hard"] * 4] * 4
    module, _ = run(mixture(curriculum=PHASES), max_steps=-1, max_epochs=2)
    assert module.sources == [["easy"] * 3 + ["hard"]] * 4 + [["hard"] * 4] * 4


@pytest.mark.parametrize("curriculum", [None, PHASES], ids=["one phase", "two phases"])
def test_a_training_resumed_after_any_step_has_the_rows_of_an_uninterrupted_one(
    tmp_path, curriculum
):
    saver = SaveEverywhere(tmp_path)
    whole, _ = run(mixture(curriculum=curriculum), saver)
    assert len(saver.saved) >= 8
    for step, hook, path in saver.saved:
        resumed, _ = run(mixture(curriculum=curriculum), checkpoint=path)
        assert resumed.trained == whole.trained[step:], f"{hook} after step {step}"


def test_the_seed_and_that_of_a_source_change_the_order():
    first = fit(mixture(), max_steps=4).trained
    assert fit(mixture(), max_steps=4).trained == first
    assert fit(mixture(seed=1), max_steps=4).trained != first


def test_the_start_of_a_run_says_the_numbers_of_every_phase(caplog):
    with caplog.at_level("INFO", logger="lit_grpo"):
        run(mixture(curriculum=PHASES))
    assert "train data of easy: 10 rows" in caplog.text
    assert "phase 1 from optimizer step 0: every step has 3 of easy, 1 of hard" in caplog.text
    assert "phase 2 from optimizer step 4: every step has 0 of easy, 4 of hard" in caplog.text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sources": {}}, "one source or more"),
        ({"sources": {"a b": MixtureSource(data=sums())}}, "they name metrics"),
        (
            {"sources": {"a": sums()}},
            r"of type MixtureSource, got AdditionData \(write MixtureSource\(data=\.\.\.\)\)",
        ),
        ({"sources": {"a": {"weight": 2}}}, r"write MixtureSource\(weight=2\)"),
        (
            {"sources": {"a": MixtureSource(data=AdditionData(prompts_per_step=8))}},
            "must not set prompts_per_step, got 8 in data.sources.a",
        ),
        (
            {"sources": {"a": MixtureSource(data=PromptData("x", validation_batch_size=8))}},
            "must not set validation_batch_size",
        ),
        (
            {"sources": {"a": MixtureSource(data=sums()), "b": RARE}},
            "'b' with weight 0.01",
        ),
        ({"curriculum": "1:1:1"}, "a list of phases unless"),
        ({"prompts_per_step": 0}, "prompts_per_step must be >= 1"),
    ],
)
def test_settings_without_sense_are_refused(settings, reason):
    with pytest.raises(UserError, match=reason):
        mixture(**settings)


def test_a_mixture_in_a_mixture_and_a_run_without_an_end_are_refused():
    with pytest.raises(UserError, match="data of one source"):
        MixtureData({"a": MixtureSource(data=mixture())})
    with pytest.raises(UserError, match="length of the run"):
        run(mixture(curriculum=PHASES), max_steps=-1, max_epochs=-1)
    with pytest.raises(UserError, match="overfit_batches must be 0"):
        run(mixture(), overfit_batches=1)


def test_a_source_without_rows_is_named():
    empty = MixtureSource(data=PromptData())
    with pytest.raises(UserError, match="the source 'none' must have training data"):
        run(mixture(sources={"none": empty}))
