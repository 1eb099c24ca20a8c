import pytest
import torch
from scorer_models import save_llama
from small_runs import PROMPTS, fit, make_module, make_trainer

from lit_grpo.callbacks import Checkpoints
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.objective import KLTerm, Objective
from lit_grpo.rewards import ScorerReward
from lit_grpo.training import OutagePolicy
from lit_grpo.types import UserError

ADAPTIVE = Objective(kl=KLTerm(coef=0.1, target=0.5))
"""Its coefficient falls, since the policy diverges less."""


def test_a_reward_model_whose_files_were_replaced_ends_the_resume(tmp_path):
    path, last = tmp_path / "scorer", tmp_path / "last.ckpt"
    rewards = [ScorerReward(path=save_llama(path), name="helpful")]
    fit(make_module(rewards=rewards), callbacks=[Checkpoints(dirpath=str(tmp_path))], max_steps=1)
    save_llama(path, initializer_range=0.3)
    with pytest.raises(UserError, match="path of 'helpful' must have the weights that the run"):
        fit(make_module(rewards=rewards), max_steps=2, ckpt_path=last)
    save_llama(path)
    fit(make_module(rewards=rewards), max_steps=2, ckpt_path=last)


def test_a_reward_model_that_is_not_there_is_refused_by_the_reward(tmp_path):
    module = make_module(rewards=[ScorerReward(path=str(tmp_path / "nowhere"))])
    with pytest.raises(UserError, match=r"path must be a reward model"):
        fit(module, max_steps=1)


def test_an_evaluation_leaves_the_reward_models_of_a_module(tmp_path):
    module = make_module(rewards=[ScorerReward(path=save_llama(tmp_path / "scorer"), name="mine")])
    fit(module, max_steps=1)
    make_trainer().validate(module, PromptLoader(PROMPTS, 4, training=False))
    assert [*module._reward_models] == ["ScorerReward.init_args.path of 'mine'"]


def test_a_checkpoint_has_what_a_module_counts_and_adapts(tmp_path):
    module = make_module(objective=ADAPTIVE)
    fit(module, callbacks=[Checkpoints(dirpath=str(tmp_path))], max_steps=2)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["rollout_step"] == 2
    coef = module.policy_updater.coefficients.kl.coef
    assert coef < 0.1

    other = make_module(objective=ADAPTIVE)
    changed = {"num_skipped": 3, "num_empty_steps": 2, "num_rollbacks": 1}
    fit(other, max_steps=0)  # which loads the policy
    other.on_load_checkpoint(checkpoint | changed)
    assert other.rollout_step == 2
    assert other.skipped_steps.in_a_row == 3
    assert other.empty_steps.in_a_row == 2
    assert other.num_rollbacks == 1
    assert other.policy_updater.coefficients.kl.coef == coef


def test_a_rollback_takes_the_adapted_coefficient_and_keeps_the_number_of_the_step(tmp_path):
    module = make_module(objective=ADAPTIVE)
    fit(module, callbacks=[Checkpoints(dirpath=str(tmp_path), every_n_steps=1)], max_steps=2)
    coef = module.policy_updater.coefficients.kl.coef
    module.skipped_steps.load(2)
    module.on_roll_back(torch.load(tmp_path / "step_000001.ckpt", weights_only=True))
    assert coef < module.policy_updater.coefficients.kl.coef < 0.1
    assert (module.rollout_step, module.num_rollbacks, module.policy_version) == (2, 1, 3)
    assert module.skipped_steps.in_a_row == 0


def test_settings_name_what_decides_what_is_learned_and_what_may_change():
    settings = make_module().settings()
    assert settings["rewards"] == ["share_of_low_bytes"]
    assert settings["rewards.share_of_low_bytes"] == "ShareOfLowBytes with weight 1"
    assert make_module(group_size=6).settings() == settings | {"group_size": 6}
    other = make_module(outage=OutagePolicy(max_absent_fraction=0.25))
    assert other.settings() == settings
    changed = {"outage.max_absent_fraction": 0.25}
    assert other.changeable_settings() == make_module().changeable_settings() | changed
