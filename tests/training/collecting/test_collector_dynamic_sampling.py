"""Groups without an advantage are replaced with groups from further prompts, in data order."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from easy_prompts import EqualOnEasyPrompts, prompts
from small_runs import PROMPTS, Keep, fit, make_module, make_trainer, weights

from lit_grpo.callbacks import Checkpoints
from lit_grpo.data.loading.loader import PromptLoader


def run(kinds: str, *, rounds: int, max_steps: int = 1, **settings):
    module = make_module(rewards=[EqualOnEasyPrompts()], dynamic_sampling_rounds=rounds, **settings)
    return fit(module, prompts=prompts(kinds), shuffle=False, max_steps=max_steps)


def ids(output) -> list[str]:
    return [group.prompt.id for group in output["rollouts"].groups]


def test_groups_without_signal_are_replaced_by_the_next_prompts_of_the_data():
    first, second = run("hehehhhhhhhh", rounds=3, max_steps=2)
    assert ids(first) == ["hard0", "hard4", "hard2", "hard5"]
    assert ids(second) == ["hard6", "hard7", "hard8", "hard9"]  # no prompt is repeated or skipped
    assert first["metrics"]["dynamic_sampling/sampled_per_group"] == 6 / 4
    assert first["metrics"]["dynamic_sampling/unfilled_fraction"] == 0
    assert second["metrics"]["dynamic_sampling/sampled_per_group"] == 1
    assert (first["batch"].advantages.view(4, 4) != 0).any(1).all()


def test_the_number_of_rounds_is_limited_and_unfilled_groups_are_counted():
    (output,) = run("heeeeeeheehhhh", rounds=2)
    assert ids(output) == ["hard0", "hard7", "easy8", "easy9"]
    assert output["metrics"]["dynamic_sampling/sampled_per_group"] == 10 / 4
    assert output["metrics"]["dynamic_sampling/unfilled_fraction"] == 2 / 4


def test_the_logged_reward_is_that_of_the_groups_before_replacement():
    (output,) = run("eeeehhhh", rounds=1)
    assert ids(output) == ["hard4", "hard5", "hard6", "hard7"]
    assert output["metrics"]["reward/mean"] == 1.0
    assert output["metrics"]["reward/frac_zero_std"] == 1.0
    assert output["rollouts"].rewards.mean() < 1


def test_without_rounds_no_group_is_replaced():
    (output,) = run("hehehhhh", rounds=0)
    assert ids(output) == ["hard0", "easy1", "hard2", "easy3"]
    assert "dynamic_sampling/sampled_per_group" not in output["metrics"]


def test_prompts_of_the_next_epoch_are_used_when_an_epoch_has_too_few():
    first, second, third = run("hehhheh", rounds=1, max_steps=3)
    # After the first four, too few prompts are left for a batch, so a new epoch begins.
    assert ids(first) == ["hard0", "hard0", "hard2", "hard3"]
    assert ids(second) == ["hard0", "hard2", "hard3", "hard4"]
    assert ids(third) == ids(second)


def test_a_group_is_replaced_by_one_of_the_same_source():
    class BySource(PromptLoader):
        def take(self, needed):
            asked.append(dict(needed))
            return {
                name: [replace(one, source=name) for one in self._take(number)]
                for name, number in needed.items()
            }

    asked: list[dict[str, int]] = []
    names = ["sums", "essays", "sums", "essays", *([""] * 8)]
    rows = [
        replace(one, source=name) for one, name in zip(prompts("heeehhhhhhhh"), names, strict=True)
    ]
    module = make_module(rewards=[EqualOnEasyPrompts()], dynamic_sampling_rounds=1)
    keep = Keep()
    make_trainer(keep).fit(module, BySource(rows, 4, shuffle=False))
    (output,) = keep.outputs
    assert asked == [{"essays": 2, "sums": 1}]
    found = [group.prompt for group in output["rollouts"].groups]
    assert [one.id for one in found] == ["hard0", "hard4", "hard6", "hard5"]
    assert [one.source for one in found] == names[:4]


class SeeValidations(L.Callback):
    def __init__(self):
        self.steps, self.epochs = [], []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(pl_module.rollout_step)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.epochs.append(trainer.current_epoch)


def test_further_prompts_neither_end_an_epoch_nor_prevent_its_validation(tmp_path):
    def trained(max_steps, ckpt_path=None):
        module = make_module(rewards=[EqualOnEasyPrompts()], dynamic_sampling_rounds=2)
        seen, saving = SeeValidations(), Checkpoints(dirpath=str(tmp_path))
        trainer = make_trainer(seen, saving, max_steps=max_steps, num_sanity_val_steps=0)
        loader = PromptLoader(prompts("hehehheehhhe"), 4, seed=1)  # three steps an epoch
        held_out = PromptLoader(PROMPTS, 4, training=False)
        trainer.fit(module, loader, held_out, ckpt_path=ckpt_path, weights_only=True)
        return trainer.train_dataloader.state_dict(), seen

    state, seen = trained(7)
    assert (state["batches"], state["epoch"] >= 3) == (7, True)  # of passes
    assert (seen.steps, seen.epochs) == ([3, 6], [0, 0, 0, 1, 1, 1, 2])
    _, first = trained(3)
    _, rest = trained(7, tmp_path / "last.ckpt")
    assert first.steps + rest.steps == seen.steps
    assert first.epochs + rest.epochs == seen.epochs


@pytest.mark.slow
def test_a_resumed_run_samples_the_same_further_prompts(tmp_path):
    kinds = "hehehheehhhehehhhehhhhh"

    def trained(max_steps, ckpt_path=None):
        module = make_module(rewards=[EqualOnEasyPrompts()], dynamic_sampling_rounds=2)
        trainer = make_trainer(max_steps=max_steps)
        loader = PromptLoader(prompts(kinds), 4, seed=1)
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
        return module, trainer

    whole, trainer = trained(3)
    assert trainer.train_dataloader.state_dict()["position"] > 3 * 4  # groups were replaced
    _, trainer = trained(1)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    resumed, _ = trained(3, tmp_path / "some.ckpt")
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
