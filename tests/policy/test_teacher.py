"""The teacher: what it loads, and which models cannot teach a policy."""

import json

import pytest
import torch
from packed_batches import batch_of
from tiny import LLAMA, perturbed, tiny_policy, unbatched_logprobs

from lit_grpo.policy import LocalTeacher, Policy
from lit_grpo.policy.teacher import as_teacher
from lit_grpo.types import UserError

PROMPT = [49, 43, 49, 61]
BATCH = batch_of(PROMPT, [[7, 8, 9], [1]], PROMPT, [[2, 3], [4, 5]])


def saved(directory, **settings) -> Policy:
    policy = perturbed(tiny_policy(**settings))
    policy.save_pretrained(directory)
    return policy


def loaded(path, policy, *, temperature=1.0, top_k=None, **settings) -> LocalTeacher:
    teacher = LocalTeacher(str(path), **settings)
    teacher.load(policy, temperature=temperature, top_k=top_k)
    return teacher


@pytest.mark.parametrize("packing", [True, False])
def test_the_teacher_is_the_saved_model_frozen_and_reads_as_the_policy_does(tmp_path, packing):
    source, policy = saved(tmp_path), tiny_policy(packing=packing)
    teacher = loaded(tmp_path, policy, temperature=0.7)
    model = teacher.model
    teacher.load(policy, temperature=0.7, top_k=None)
    assert teacher.model is model
    assert teacher.uses_packing == packing
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    (logprobs,) = teacher.read(BATCH)
    expected, _ = unbatched_logprobs(source.model, BATCH, 0, 0.7)
    torch.testing.assert_close(logprobs[0], expected, rtol=0, atol=1e-5)


def test_the_most_likely_tokens_are_those_of_the_policys_vocabulary(tmp_path):
    source = saved(tmp_path, architecture=LLAMA | {"vocab_size": 300})
    with torch.no_grad():
        source.model.get_output_embeddings().weight[258:] *= 100  # often among the most likely
    source.save_pretrained(tmp_path)
    ids, logprobs = loaded(tmp_path, tiny_policy(), temperature=0.7, top_k=5).read(BATCH)
    assert ids.shape == logprobs.shape == (4, 3, 5)
    assert ids.dtype == torch.int32
    for row, length in enumerate(BATCH.completion_mask.sum(1).tolist()):
        text = torch.tensor([[*PROMPT, *BATCH.completion_ids[row, :length].tolist()]])
        with torch.no_grad():
            logits = source.model(text).logits[0, len(PROMPT) - 1 : -1] / 0.7
        top = logits[:, :258].topk(5)
        assert ids[row, :length].tolist() == top.indices.tolist()
        expected = logits.log_softmax(-1).gather(1, top.indices)
        torch.testing.assert_close(logprobs[row, :length], expected, rtol=0, atol=1e-4)
        assert not ids[row, length:].any()


def test_a_teacher_may_be_larger_than_the_policy_and_in_16_bits(tmp_path):
    saved(tmp_path, architecture=LLAMA | {"hidden_size": 64, "num_hidden_layers": 3})
    teacher = loaded(tmp_path, tiny_policy(), dtype="bfloat16")
    assert teacher.model.dtype == torch.bfloat16
    assert teacher.read(BATCH)[0].dtype == torch.float32


def test_a_path_without_a_model_names_the_setting():
    with pytest.raises(UserError, match=r"no tokenizer .* Set model\.teacher\.path"):
        loaded("./nowhere", tiny_policy())


def test_a_tokenizer_with_other_ids_is_refused(tmp_path):
    saved(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"2 tokens differ.*Set model\.teacher\.path"):
        loaded(tmp_path, tiny_policy())


def test_a_tokenizer_with_the_same_tokens_that_splits_texts_differently_is_refused(tmp_path):
    saved(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"splits .* differently.*Set model\.teacher\.path"):
        loaded(tmp_path, tiny_policy())


def test_a_teacher_without_logits_for_a_token_of_the_policy_is_refused(tmp_path):
    saved(tmp_path)
    policy = tiny_policy(architecture=LLAMA | {"vocab_size": 300})
    with pytest.raises(UserError, match=r"300 tokens, got 258 .* Set model\.teacher\.path"):
        loaded(tmp_path, policy)


def test_a_teacher_is_an_object_or_a_path(tmp_path):
    teacher = LocalTeacher("a")
    assert as_teacher(None) is None
    assert as_teacher(teacher) is teacher
    assert as_teacher(tmp_path).path == str(tmp_path)
    policy = Policy("a")
    for given, got in (
        (policy, "an object of type Policy"),
        (LocalTeacher, "the class LocalTeach"),
    ):
        with pytest.raises(UserError, match=rf"got {got}.* write LocalTeacher\(path\)"):
            as_teacher(given)
