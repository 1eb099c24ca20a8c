"""A model is recognised by its weights, however they are divided into files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import tiny_policy

from lit_grpo.policy import LoRA
from lit_grpo.policy.files.model_source import ModelSource, refuse_changed, save_sources
from lit_grpo.types import UserError


def digest(path) -> str | None:
    return ModelSource.of(str(path)).digest


def test_other_files_and_a_copy_have_the_digest_of_the_weights(tmp_path):
    model = tiny_policy().model
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert digest(tmp_path / "one") == digest(tmp_path / "many")


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_a_changed_weight_changes_the_digest(tmp_path, name):
    policy = tiny_policy()
    policy.model.save_pretrained(tmp_path)
    before = digest(tmp_path)
    with torch.no_grad():
        policy.model.get_parameter(name).add_(1e-3)
    policy.model.save_pretrained(tmp_path)
    assert digest(tmp_path) != before


def test_an_adapter_has_another_digest_with_another_base(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny_policy().save_pretrained(base)
    policy = tiny_policy(architecture=None, path=str(base), lora=LoRA(rank=2), merge_lora=False)
    policy.save_pretrained(adapter)
    before = digest(adapter)
    assert before == digest(adapter)
    changed = tiny_policy()
    with torch.no_grad():
        changed.model.get_input_embeddings().weight.mul_(1.1)
    changed.save_pretrained(base)
    assert digest(adapter) != before


def test_pickled_weights_are_told_apart(tmp_path):
    torch.save({"a": torch.zeros(9000)}, tmp_path / "pytorch_model.bin")
    before = digest(tmp_path)
    torch.save({"a": torch.ones(9000)}, tmp_path / "pytorch_model.bin")
    assert digest(tmp_path) != before


def test_the_digest_of_a_hub_id_is_its_commit(tmp_path, monkeypatch):
    config = tmp_path / "models--org--model" / "snapshots" / "abc123" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    refs = tmp_path / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert digest("org/model") == "abc123"
    assert digest("org/other") is None


def test_another_model_is_refused_unless_it_is_wanted_or_not_read_again():
    own = ModelSource("runs/sft/0/final", "a")

    def refuse(saved: ModelSource, own: ModelSource = own, **settings: bool) -> None:
        checkpoint: dict = {}
        save_sources(checkpoint, {"key": saved})
        refuse_changed(checkpoint, {"key": own}, **settings)

    for saved in (own, ModelSource("moved", "a"), ModelSource(own.path, None)):
        refuse(saved)
    refuse(ModelSource("other", "b"), may_be_others=True)
    refuse(ModelSource(own.path, "b"), replace(own, is_read_again=False))
    for now in (own, replace(own, is_read_again=False)):
        with pytest.raises(UserError, match="key must be the model that .* other, got runs/sft/0"):
            refuse(ModelSource("other", "b"), now)
    refuse_changed({}, {"key": own})
    refuse_changed({}, {})
    with pytest.raises(UserError, match="key must have the weights that the run began with"):
        refuse(ModelSource(own.path, "b"))


def test_the_digest_does_not_depend_on_the_default_device(tmp_path):
    tiny_policy().model.save_pretrained(tmp_path)
    before = digest(tmp_path)
    with torch.device("meta"):
        assert digest(tmp_path) == before
