"""Groups without an advantage make room for further prompts, in the order of the data."""

import pytest
import torch
from easy_prompts import EasyPromptsTeachNothing, prompts
from small_runs import fit, make_module, make_trainer, weights

from lit_grpo.data import PromptLoader


def run(kinds: str, *, rounds: int, max_steps: int = 1, **settings):
    module = make_module(
        rewards=[EasyPromptsTeachNothing()], dynamic_sampling_rounds=rounds, **settings
    )
    return fit(module, prompts=prompts(kinds), shuffle=False, max_steps=max_steps)


def ids(output) -> list[str]:
    return [group.prompt.id for group in output["rollouts"].groups]


def test_groups_without_signal_are_replaced_by_the_next_prompts_of_the_data():
    first, second = run("hehehhhhhhhh", rounds=3, max_steps=2)
    assert ids(first) == ["hard0", "hard4", "hard2", "hard5"]
    assert ids(second) == ["hard6", "hard7", "hard8", "hard9"]  # none twice, none left out
    assert first["metrics"]["dynamic_sampling/sampled_per_group"] == 6 / 4
    assert first["metrics"]["dynamic_sampling/unfilled_fraction"] == 0
    assert second["metrics"]["dynamic_sampling/sampled_per_group"] == 1
    assert (first["batch"].advantages.view(4, 4) != 0).any(1).all()


def test_the_rounds_are_bounded_and_what_is_left_is_counted():
    (output,) = run("heeeeeeheehhhh", rounds=2)
    assert ids(output) == ["hard0", "hard7", "easy8", "easy9"]
    assert output["metrics"]["dynamic_sampling/sampled_per_group"] == 10 / 4
    assert output["metrics"]["dynamic_sampling/unfilled_fraction"] == 2 / 4


def test_the_logged_reward_is_that_of_the_prompts_that_came_first():
    (output,) = run("eeeehhhh", rounds=1)
    assert ids(output) == ["hard4", "hard5", "hard6", "hard7"]
    assert output["metrics"]["reward/mean"] == 1.0
    assert output["metrics"]["reward/frac_zero_std"] == 1.0
    assert output["rollouts"].rewards.mean() < 1


def test_without_rounds_nothing_is_sampled_again():
    (output,) = run("hehehhhh", rounds=0)
    assert ids(output) == ["hard0", "easy1", "hard2", "easy3"]
    assert "dynamic_sampling/sampled_per_group" not in output["metrics"]


def test_an_epoch_that_runs_out_of_prompts_goes_on_with_the_next():
    first, second, third = run("hehhheh", rounds=1, max_steps=3)
    # Behind the first four too few are left for a batch: the next prompt is that of a new epoch.
    assert ids(first) == ["hard0", "hard0", "hard2", "hard3"]
    assert ids(second) == ["hard0", "hard2", "hard3", "hard4"]
    assert ids(third) == ids(second)


def test_a_resumed_run_samples_the_same_further_prompts(tmp_path):
    kinds = "hehehheehhhhhhhehhhhhhh"

    def trained(max_steps, ckpt_path=None):
        module = make_module(rewards=[EasyPromptsTeachNothing()], dynamic_sampling_rounds=2)
        trainer = make_trainer(max_steps=max_steps)
        loader = PromptLoader(prompts(kinds), 4, seed=1)
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
        return module, trainer

    whole, _ = trained(5)
    _, trainer = trained(2)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    resumed, _ = trained(5, tmp_path / "some.ckpt")
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[name]), name


def test_a_loader_hands_every_rank_its_share_of_further_prompts():
    loaders = [
        PromptLoader(prompts("h" * 12), 4, rank=rank, world_size=2, shuffle=False)
        for rank in (0, 1)
    ]
    batches = [next(iter(loader)) for loader in loaders]
    extra = [loader.take(1) for loader in loaders]
    after = [next(iter(loader)) for loader in loaders]
    numbers = [[[p.id for p in part] for part in parts] for parts in (batches, extra, after)]
    assert numbers == [
        [["hard0", "hard1"], ["hard2", "hard3"]],
        [["hard4"], ["hard5"]],
        [["hard6", "hard7"], ["hard8", "hard9"]],
    ]
    assert loaders[0].state_dict() == loaders[1].state_dict()


def test_a_negative_number_of_rounds_is_refused():
    with pytest.raises(ValueError, match="Set model.dynamic_sampling_rounds"):
        make_module(dynamic_sampling_rounds=-1)
