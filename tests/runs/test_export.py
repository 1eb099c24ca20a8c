"""A checkpoint of a run made in Python becomes the model that the run would have written."""

import shutil

import pytest
from run_logs import close_logs
from small_runs import ShareOfLowBytes, make_module
from tiny import LLAMA, tiny_policy

from lit_grpo import AdditionData, Policy, Trainer, export_checkpoint
from lit_grpo.callbacks import Checkpoints
from lit_grpo.objective import KLTerm, Objective
from lit_grpo.policy import LoRA
from lit_grpo.types import UserError


def train(run_dir, **settings):
    module = make_module(group_size=2, rewards=[ShareOfLowBytes()], **settings)
    saving = Checkpoints(every_n_steps=1, keep_last=9)
    options = {"accelerator": "cpu", "enable_progress_bar": False, "callbacks": [saving]}
    trainer = Trainer(run_dir, max_steps=2, **options)
    try:
        trainer.fit(module, AdditionData(1, train_size=8, validation_size=0, prompts_per_step=2))
    finally:
        close_logs()


def weights_in(directory):
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_what_a_checkpoint_leaves_out_is_not_missed(lora, tmp_path):
    start, run = tmp_path / "start", tmp_path / "run"
    tiny_policy(seed=3).save_pretrained(start)
    settings = {"path": str(start), "architecture": None, "lora": lora}
    train(run, policy=settings, objective=Objective(kl=KLTerm(coef=0.1)))
    policy = Policy(str(start), lora=lora)
    export_checkpoint(run / "checkpoints/last.ckpt", tmp_path / "last", policy=policy)
    assert weights_in(tmp_path / "last") == weights_in(run / "final")
    exported = (tmp_path / "last" / "prompt_format.json").read_text()
    assert exported == (run / "final" / "prompt_format.json").read_text()
    first = run / "checkpoints/step_000001.ckpt"
    export_checkpoint(str(first), tmp_path / "first", policy=Policy(str(start), lora=lora))
    assert weights_in(tmp_path / "first") != weights_in(run / "final")
    card = (tmp_path / "first/README.md").read_text()
    assert (
        f"- **Checkpoint:** step_000001.ckpt of {tmp_path.name}/run, after rollout step 1" in card
    )
    assert f"# GRPO from {start}\n" in card
    assert "## Settings" not in card
    for given in (run, run / "checkpoints", run / "final"):
        advice = rf"{given} \(to export the last one give {run}/checkpoints/last.ckpt\)"
        with pytest.raises(UserError, match=f"^checkpoint must be one of a run, got {advice}"):
            export_checkpoint(given, tmp_path / "other", policy=policy)
    with pytest.raises(UserError, match="got one that a module uses"):
        export_checkpoint(first, tmp_path / "other", policy=policy)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("trained", "other", "said"),
    [
        ({"lora": LoRA(rank=2, alpha=8)}, {"lora": LoRA(rank=2)}, r"lora\.alpha: 8 -> 32"),
        ({}, {"architecture": LLAMA | {"hidden_act": "gelu"}}, r"architecture\.hidden_act: silu"),
    ],
)
def test_a_policy_whose_weights_compute_something_else_is_refused(trained, other, said, tmp_path):
    """Names and shapes of the weights are the same."""
    architecture = {"architecture": LLAMA}
    train(tmp_path / "run", policy=architecture | trained)
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    message = rf"other settings of the policy, .*: model\.policy\.{said}.*Set them as in that run"
    with pytest.raises(UserError, match=message):
        export_checkpoint(
            checkpoint, tmp_path / "other", policy=Policy(**architecture | trained | other)
        )
    assert not (tmp_path / "other").exists()
    data = AdditionData(1, train_size=8, validation_size=2, prompts_per_step=2)
    trainer = Trainer(tmp_path / "run", accelerator="cpu", enable_progress_bar=False)
    for evaluate in (trainer.validate, trainer.test):
        module = make_module(group_size=2, policy=architecture | trained | other)
        with pytest.raises(UserError, match=message):
            evaluate(module, data, ckpt_path="last")
    same = Policy(**{"architecture": LLAMA | {"hidden_act": "silu"}} | trained)  # the default
    export_checkpoint(checkpoint, tmp_path / "same", policy=same)
    assert weights_in(tmp_path / "same") == weights_in(tmp_path / "run/final")


def test_a_checkpoint_that_was_copied_has_no_settings_of_what_lies_beside_it(tmp_path):
    start = tmp_path / "start"
    tiny_policy(seed=3).save_pretrained(start)
    train(tmp_path / "run", policy={"path": str(start), "architecture": None})
    (tmp_path / "project/kept").mkdir(parents=True)
    (tmp_path / "project/config.yaml").write_text("model: of something else\n")
    copied = shutil.copy(tmp_path / "run/checkpoints/step_000001.ckpt", tmp_path / "project/kept")
    export_checkpoint(copied, tmp_path / "exported", policy=str(start))
    card = (tmp_path / "exported/README.md").read_text()
    assert "- **Checkpoint:** step_000001.ckpt\n" in card
    assert "something else" not in card


def test_a_place_with_files_and_a_checkpoint_that_is_none_are_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    policy = Policy(architecture=LLAMA)
    with pytest.raises(UserError, match=r"^checkpoint must be one of a run, got .*none.ckpt"):
        export_checkpoint(tmp_path / "none.ckpt", tmp_path / "new", policy=policy)
    with pytest.raises(UserError, match="^directory must be a new or empty directory, got"):
        export_checkpoint(tmp_path / "full", tmp_path / "full", policy=policy)
    (tmp_path / "cut.ckpt").write_bytes(b"PK")
    with pytest.raises(UserError, match="intact, got .*cut.ckpt .it was not written to its end"):
        export_checkpoint(tmp_path / "cut.ckpt", tmp_path / "new", policy=policy)
