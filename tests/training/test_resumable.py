"""What a checkpoint of a module leaves out, and which changes end a resume."""

import pytest
import torch
from small_runs import PROMPTS, ShareOfLowBytes, fit, make_module, make_trainer, weights
from tiny import LLAMA, tiny_policy

from lit_grpo.callbacks import Checkpoints
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.objective import KLTerm, Objective
from lit_grpo.policy import LoRA, Policy
from lit_grpo.policy.files.model_source import ModelSource, as_plain, save_sources
from lit_grpo.rollout import Sampling
from lit_grpo.training import GRPOModule, MasterAdamW
from lit_grpo.training.checks.resume_changes import RunSettings
from lit_grpo.types import UserError


def test_a_checkpoint_of_an_adapter_omits_its_base_and_can_be_resumed(tmp_path):
    base = tmp_path / "base"
    tiny_policy().save_pretrained(base)
    policy = {"architecture": None, "path": str(base), "lora": LoRA(rank=4)}
    module = make_module(policy=policy)
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, PromptLoader(PROMPTS, 4))
    path = tmp_path / "some.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved
    assert all("lora" in name for name in saved)
    resumed = make_module(policy=policy)
    fit(resumed, max_steps=2, ckpt_path=path)
    torch.testing.assert_close(weights(resumed), weights(module), rtol=0, atol=0)
    other = make_module(policy=policy | {"lora": LoRA(rank=4, target_modules=["lm_head"])})
    with pytest.raises(ValueError, match="it belongs to a different policy"):
        fit(other, max_steps=2, ckpt_path=path)


@pytest.mark.slow
def test_a_checkpoint_omits_a_reference_that_never_moves_and_the_resumed_run_has_it(tmp_path):
    start = tmp_path / "start"
    tiny_policy().save_pretrained(start)
    policy = {"architecture": None, "path": str(start)}
    objective = Objective(kl=KLTerm(coef=0.5))
    whole = make_module(policy=policy, objective=objective)
    fit(whole, max_steps=4)
    module = make_module(policy=policy, objective=objective)
    saving = Checkpoints(dirpath=str(tmp_path))
    fit(module, callbacks=[saving], max_steps=2)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == {f"policy.model.{name}" for name in module.policy.model.state_dict()}
    resumed = make_module(policy=policy, objective=objective)
    fit(resumed, max_steps=4, ckpt_path=tmp_path / "last.ckpt")
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    ours, theirs = (one.policy.reference_model.state_dict() for one in (resumed, whole))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_reference_whose_files_were_replaced_ends_the_resume_and_only_that(tmp_path):
    start, last = tmp_path / "start", tmp_path / "last.ckpt"
    tiny_policy().save_pretrained(start)
    policy = {"architecture": None, "path": str(start)}
    with_reference = {"policy": policy, "objective": Objective(kl=KLTerm(coef=0.5))}
    fit(make_module(**with_reference), callbacks=[Checkpoints(dirpath=str(tmp_path))], max_steps=2)
    tiny_policy(seed=1).save_pretrained(start)
    with pytest.raises(UserError, match="have been replaced since"):
        fit(make_module(**with_reference), max_steps=3, ckpt_path=last)
    make_trainer().validate(make_module(**with_reference), PromptLoader(PROMPTS, 4), last)

    own_weights = make_module(policy=policy)  # all of them are in the checkpoint
    tiny_policy().save_pretrained(start)
    fit(own_weights, callbacks=[Checkpoints(dirpath=str(tmp_path / "own"))], max_steps=2)
    tiny_policy(seed=1).save_pretrained(start)
    fit(make_module(policy=policy), max_steps=3, ckpt_path=tmp_path / "own" / "last.ckpt")


@pytest.mark.parametrize("refresh_every", [None, 1], ids=["random weights", "moving"])
def test_a_reference_that_cannot_be_read_again_is_in_the_checkpoint(tmp_path, refresh_every):
    start = tmp_path / "start"
    tiny_policy().save_pretrained(start)
    policy = {"architecture": None, "path": str(start)} if refresh_every else {}
    objective = Objective(kl=KLTerm(coef=0.5, refresh_every=refresh_every))
    module = make_module(policy=policy, objective=objective)
    fit(module, callbacks=[Checkpoints(dirpath=str(tmp_path))], max_steps=2)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert any("reference_model" in name for name in saved)
    assert saved.keys() == module.state_dict().keys()


@pytest.fixture(scope="module")
def of_adamw(tmp_path_factory):
    """Return a checkpoint of two steps of AdamW."""
    directory = tmp_path_factory.mktemp("adamw")
    fit(make_module(optimizer=adamw), callbacks=[Checkpoints(dirpath=str(directory))], max_steps=2)
    return directory / "last.ckpt"


def adamw(params, **settings):
    return torch.optim.AdamW(params, lr=1e-3, **settings)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (torch.optim.RMSprop, {"step", "square_avg"}),
        (torch.optim.Adagrad, {"step", "sum"}),
        (torch.optim.SGD, set()),
    ],
)
def test_an_optimizer_of_another_class_begins_with_an_empty_state(of_adamw, kind, keys, caplog):
    caplog.set_level("INFO")
    module = make_module(optimizer=lambda params: kind(params, lr=0.25))
    module.allow_changes = True
    fit(module, max_steps=3, ckpt_path=of_adamw)
    (optimizer,) = module.trainer.optimizers
    states = [*optimizer.state.values()]
    assert {key for state in states for key in state} == keys
    assert {float(state["step"]) for state in states if state} <= {1.0}
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]
    said = [one for one in caplog.messages if "begins with an empty state" in one]
    assert said == [
        f"{kind.__name__} begins with an empty state: the moments of AdamW in the checkpoint are "
        "of no use to it, and are dropped"
    ]


@pytest.mark.parametrize("allows", [False, True])
def test_settings_that_need_another_state_are_refused_or_begin_with_an_empty_one(
    of_adamw, allows, caplog
):
    caplog.set_level("INFO")
    module = make_module(optimizer=lambda params: adamw(params, amsgrad=True))
    module.allow_changes = allows
    if not allows:
        with pytest.raises(
            UserError, match=r"not have: model.optimizer.amsgrad: False -> True\. P"
        ):
            fit(module, max_steps=3, ckpt_path=of_adamw)
        return
    fit(module, max_steps=3, ckpt_path=of_adamw)
    (optimizer,) = module.trainer.optimizers
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert "AdamW begins with an empty state" in caplog.text


def test_a_class_that_takes_the_state_over_goes_on_with_it(of_adamw, caplog):
    caplog.set_level("INFO")
    module = make_module(optimizer=lambda params: MasterAdamW(params, lr=1e-3, weight_decay=0.5))
    module.allow_changes = True
    fit(module, max_steps=3, ckpt_path=of_adamw)
    (optimizer,) = module.trainer.optimizers
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    assert "empty state" not in caplog.text


def test_a_checkpoint_that_does_not_say_its_class_is_loaded_as_it_is(of_adamw, tmp_path):
    saved = torch.load(of_adamw, weights_only=False)
    del saved["run_settings"]["model.optimizer"]
    torch.save(saved, tmp_path / "old.ckpt")
    module = make_module(optimizer=adamw)
    fit(module, max_steps=3, ckpt_path=tmp_path / "old.ckpt")
    (optimizer,) = module.trainer.optimizers
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_an_adapter_of_another_model_is_not_evaluated_though_its_run_went_on_with_it():
    """What a resumed run was allowed is not allowed of the checkpoints of other runs."""
    module = make_module(policy={"lora": LoRA(rank=2)})
    module.policy.load(with_reference=False)
    module.policy.loaded_from = ModelSource("mine", "a")
    checkpoint = {"state_dict": module.state_dict(), "optimizer_settings": {}}
    save_sources(checkpoint, {"model.policy.path": ModelSource("theirs", "b")})
    last = RunSettings()
    last.record_start("sources", as_plain(module._sources()))
    module.take_last_start(last.checksums, 1, lambda path: False)
    with pytest.raises(UserError, match="must be the model that the run began with, theirs"):
        module.on_load_checkpoint(checkpoint)


def test_a_checkpoint_is_loaded_as_in_lightning_with_the_arguments_of_the_module(tmp_path):
    trained = make_module()
    fit(trained, callbacks=[Checkpoints(dirpath=str(tmp_path))], max_steps=1)
    with pytest.raises(UserError, match=r"such as policy= .*Policy\('RUN/final'\)"):
        GRPOModule.load_from_checkpoint(tmp_path / "last.ckpt")
    loaded = GRPOModule.load_from_checkpoint(
        tmp_path / "last.ckpt",
        policy=Policy(architecture=LLAMA),
        rewards=[ShareOfLowBytes()],
        sampling=Sampling(max_tokens=8),
    )
    torch.testing.assert_close(weights(loaded), weights(trained), rtol=0, atol=0)


class Mine(GRPOModule):
    def __init__(self, path, alpha):
        super().__init__(
            Policy(path, lora=LoRA(rank=2)),
            rewards=[ShareOfLowBytes()],
            group_size=2,
            sampling=Sampling(max_tokens=8),
        )
        self.save_hyperparameters()


def test_a_subclass_is_loaded_by_its_hyperparameters_with_an_adapter_on_the_base_from_its_path(
    tmp_path,
):
    tiny_policy().save_pretrained(tmp_path / "base")
    trained = Mine(str(tmp_path / "base"), 0.5)
    fit(trained, callbacks=[Checkpoints(dirpath=str(tmp_path))], max_steps=1)
    loaded = Mine.load_from_checkpoint(tmp_path / "last.ckpt")
    torch.testing.assert_close(weights(loaded), weights(trained), rtol=0, atol=0)
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        loaded.load_from_checkpoint(tmp_path / "last.ckpt")
    other = tmp_path / "other"
    tiny_policy(architecture=LLAMA | {"hidden_size": 16}).save_pretrained(other)
    with pytest.raises(UserError, match="belongs to a different policy"):
        Mine.load_from_checkpoint(tmp_path / "last.ckpt", path=str(other))


class Usual(GRPOModule):
    """A subclass as users of Lightning write it."""

    def __init__(self, policy, rewards, bonus=1.0, **kwargs):
        super().__init__(policy, rewards, **kwargs)
        self.save_hyperparameters(ignore=["policy", "rewards"])


def test_settings_that_a_loaded_module_has_lost_are_named(tmp_path, caplog):
    parts = {"policy": Policy(architecture=LLAMA), "rewards": [ShareOfLowBytes()]}
    trained = Usual(**parts, bonus=2.0, group_size=2, sampling=Sampling(max_tokens=8))
    fit(trained, callbacks=[Checkpoints(dirpath=str(tmp_path))], max_steps=1)
    for sampling, lost in ((Sampling(max_tokens=9), "8 -> 9"), (Sampling(max_tokens=8), None)):
        caplog.clear()
        parts["policy"] = Policy(architecture=LLAMA)
        loaded = Usual.load_from_checkpoint(tmp_path / "last.ckpt", **parts, sampling=sampling)
        assert (loaded.group_size, loaded.hparams["bonus"]) == (2, 2.0)
        named = [one for one in caplog.messages if "other settings than the one that" in one]
        assert [f"model.sampling.max_tokens: {lost}. To have" in one for one in named] == (
            [True] if lost else []
        )
