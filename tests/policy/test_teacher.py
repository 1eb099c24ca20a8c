"""The teacher: what it loads, and which models cannot teach a policy."""

import json

import pytest
import torch
from packed_batches import batch_of
from tiny import LLAMA, perturbed, tiny_policy, unbatched_logprobs

from lit_grpo.policy import Policy, Teacher
from lit_grpo.policy.logprobs import completion_statistics
from lit_grpo.types import UserError

PROMPT = [49, 43, 49, 61]
BATCH = batch_of(PROMPT, [[7, 8, 9], [1]], PROMPT, [[2, 3], [4, 5]])


def saved(directory, **settings) -> Policy:
    policy = perturbed(tiny_policy(**settings))
    policy.save_pretrained(directory)
    return policy


@pytest.mark.parametrize("packing", [True, False])
def test_the_teacher_is_the_saved_model_frozen_and_reads_as_the_policy_does(tmp_path, packing):
    source, policy = saved(tmp_path), tiny_policy(packing=packing)
    teacher = Teacher(str(tmp_path))
    teacher.load(policy)
    loaded = teacher.model
    teacher.load(policy)
    assert teacher.model is loaded
    assert teacher.causal_model.uses_packing == packing
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    statistics = completion_statistics(teacher.causal_model, BATCH, temperature=0.7)
    expected, entropy = unbatched_logprobs(source.model, BATCH, 0, 0.7)
    torch.testing.assert_close(statistics.logprobs[0], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(statistics.entropy[0], entropy, rtol=0, atol=1e-4)


def test_a_teacher_may_be_larger_than_the_policy_and_in_16_bits(tmp_path):
    saved(tmp_path, architecture=LLAMA | {"hidden_size": 64, "num_hidden_layers": 3})
    teacher = Teacher(str(tmp_path), dtype="bfloat16")
    teacher.load(tiny_policy())
    assert teacher.model.dtype == torch.bfloat16
    assert completion_statistics(teacher.causal_model, BATCH).logprobs.dtype == torch.float32


def test_a_path_without_a_model_names_the_setting():
    with pytest.raises(UserError, match=r"no tokenizer .* Set model\.teacher\.path"):
        Teacher("./nowhere").load(tiny_policy())


def test_a_tokenizer_with_other_ids_is_refused(tmp_path):
    saved(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"2 tokens differ.*Set model\.teacher\.path"):
        Teacher(str(tmp_path)).load(tiny_policy())


def test_a_tokenizer_with_the_same_tokens_that_splits_texts_differently_is_refused(tmp_path):
    saved(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"splits .* differently.*Set model\.teacher\.path"):
        Teacher(str(tmp_path)).load(tiny_policy())


def test_a_teacher_without_logits_for_a_token_of_the_policy_is_refused(tmp_path):
    saved(tmp_path)
    policy = tiny_policy(architecture=LLAMA | {"vocab_size": 300})
    with pytest.raises(UserError, match=r"300 tokens, got 258 .* Set model\.teacher\.path"):
        Teacher(str(tmp_path)).load(policy)
