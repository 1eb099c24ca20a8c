"""Files of weights that were not copied whole are named before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_policy

from lit_grpo.policy import Policy
from lit_grpo.policy.files.shard_loading import weights_to_read_in_parts
from lit_grpo.policy.files.weight_files import check_weight_files

OPTIONS = {"dtype": "float32", "attn_implementation": None, "trust_remote_code": False}


@pytest.fixture
def saved(tmp_path) -> Path:
    """Return a model in several files with an index."""
    policy = tiny_policy()
    policy.model.save_pretrained(tmp_path, max_shard_size="20KB")
    policy.tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_whole_model_and_a_hub_id_pass(saved):
    check_weight_files(str(saved), "key")
    check_weight_files("org/model", "key")
    Policy(path=str(saved)).load(with_reference=False)


@pytest.mark.parametrize("kept", [0.5, 0])
def test_a_file_that_was_cut_off_is_named(saved, kept):
    file = sorted(saved.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    expected = f"{file} is damaged or was not copied whole .* Set model.policy.path"
    with pytest.raises(ValueError, match=expected):
        Policy(path=str(saved)).load(with_reference=False)
    with pytest.raises(ValueError, match=expected):
        weights_to_read_in_parts(str(saved), None, **OPTIONS)


@pytest.mark.parametrize("text", ['{"weight_map": {"a"', "{}", "[]"])
def test_a_damaged_index_is_named(text, saved):
    index = saved / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ValueError, match=f"{index} is damaged or was not copied whole"):
        Policy(path=str(saved)).load(with_reference=False)


def test_files_that_are_not_loaded_may_be_anything(saved):
    """`transformers` reads model.safetensors first, and leaves the index of an earlier save."""
    tiny_policy().model.save_pretrained(saved)
    assert (saved / "model.safetensors").is_file()
    (saved / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    (saved / "consolidated.safetensors").write_text("a pointer")
    Policy(path=str(saved)).load(with_reference=False)


def test_a_file_that_the_index_names_and_that_is_not_there_is_named(saved):
    file = sorted(saved.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(ValueError, match=f"{saved} lacks {file.name}, which its model.safetens"):
        Policy(path=str(saved)).load(with_reference=False)
