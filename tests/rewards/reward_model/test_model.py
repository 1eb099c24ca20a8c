"""What a scorer reads and gives, and which models it refuses."""

from pathlib import Path

import pytest
import torch
from scorer_models import (
    CHARACTERS,
    TEXTS,
    chat,
    encode,
    plain_logits,
    refusal,
    save_bert,
    save_llama,
    scores,
    values,
)
from tiny import completion, prompt
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForMaskedLM,
    BertForSequenceClassification,
)

from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rewards import ScorerReward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Outcome


def test_conversation_is_formatted_with_the_scorers_own_template(tmp_path):
    path = save_llama(tmp_path)
    got = values(ScorerReward(path), chat())
    expected = plain_logits(path, *(f"user: 1+1=\nassistant: {text}\n" for text in TEXTS))
    assert got == pytest.approx([logits.item() for logits in expected], abs=1e-5)
    assert len({round(value, 3) for value in got}) == len(TEXTS)


def test_plain_prompt_is_concatenated_with_the_completion(tmp_path):
    path = save_llama(tmp_path)
    got = values(ScorerReward(path, activation="sigmoid"), prompt("1+1="))
    expected = plain_logits(path, *(f"1+1={text}" for text in TEXTS))
    assert got == pytest.approx([logits.sigmoid().item() for logits in expected], abs=1e-5)


def test_a_prompt_that_begins_with_the_scorers_bos_does_not_get_two(tmp_path):
    path = save_llama(tmp_path, vocab_size=259)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.add_bos_token = True
    tokenizer.update_post_processor()
    tokenizer.save_pretrained(path)
    reward = ScorerReward(path, device="cpu")
    expected = values(reward, prompt("1+1="))
    assert values(reward, prompt("<bos>1+1=")) == pytest.approx(expected, abs=1e-5)


def test_conversation_without_a_template_is_read_without_the_policys_markup(tmp_path):
    path = save_llama(tmp_path, template=False)
    (expected,) = plain_logits(path, "1+1=\n\n2")
    assert values(ScorerReward(path), chat(), ["2"]) == pytest.approx([expected.item()], abs=1e-5)


def test_tokenizer_with_a_separator_gets_a_text_pair(tmp_path):
    path = save_bert(tmp_path)
    model = BertForSequenceClassification.from_pretrained(path).eval()
    texts = ["a", "b", "abba ab", "b a b a b a b a"]
    expected = []
    for text in texts:
        first = ["[CLS]", "a", "b", "[SEP]"]
        second = [*spelled(text), "[SEP]"]
        ids = torch.tensor([[CHARACTERS.index(token) for token in first + second]])
        segments = torch.tensor([[0] * len(first) + [1] * len(second)])
        with torch.no_grad():
            expected.append(model(ids, token_type_ids=segments).logits.item())
    got = values(ScorerReward(path), prompt("a b"), texts)
    assert got == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in got}) == len(texts)


def spelled(text):
    """``"ab a"`` as the word pieces ``a ##b a``."""
    return [
        letter if place == 0 else f"##{letter}"
        for word in text.split()
        for place, letter in enumerate(word)
    ]


@pytest.mark.parametrize("pad_token_id", [257, None])
def test_value_does_not_depend_on_the_batch(tmp_path, pad_token_id):
    path = save_llama(tmp_path, pad_token_id=pad_token_id)
    expected = [logits.item() for logits in plain_logits(path, *(f"1+1={text}" for text in TEXTS))]
    reward = ScorerReward(path)
    for batch_size in (1, 2, 3, 16):
        reward.batch_size = batch_size
        assert values(reward, prompt("1+1=")) == pytest.approx(expected, abs=1e-5)


def test_model_without_padding_reads_the_last_token_whatever_the_texts_end_with(tmp_path):
    path = save_llama(tmp_path, pad_token_id=None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = "!"  # the token with which the texts end
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(path)
    texts = ["!", "yes!", "a longer one!", "\x00!", "\x01"]
    expected = [logits.item() for logits in plain_logits(path, *(f"1+1={text}" for text in texts))]
    assert values(ScorerReward(path), prompt("1+1="), texts) == pytest.approx(expected, abs=1e-5)


def test_value_of_a_named_label_is_its_probability(tmp_path):
    names = {0: "bad", 1: "fair", 2: "good"}
    path = save_llama(tmp_path, num_labels=3, id2label=names, label2id={})
    logits = torch.stack(plain_logits(path, *(f"1+1={text}" for text in TEXTS)))
    good = values(ScorerReward(path, label="good"), prompt("1+1="))
    assert good == pytest.approx(logits.softmax(-1)[:, 2].tolist(), abs=1e-5)
    raw = values(ScorerReward(path, label="fair", activation="none"), prompt("1+1="))
    assert raw == pytest.approx(logits[:, 1].tolist(), abs=1e-5)


def test_several_labels_without_a_named_one_are_refused(tmp_path):
    path = save_llama(tmp_path, num_labels=2, id2label={0: "bad", 1: "good"}, label2id={})
    assert "one of bad, good, got None" in refusal(path=path)
    assert "one of bad, good, got 'great'" in refusal(path=path, label="great")


def test_softmax_over_one_label_is_refused(tmp_path):
    assert "every completion would get 1" in refusal(
        path=save_llama(tmp_path), activation="softmax"
    )


def test_causal_language_model_is_refused(tmp_path):
    message = refusal(path=save_llama(tmp_path, kind=AutoModelForCausalLM))
    assert "is a LlamaForCausalLM, whose weights lack score.weight" in message
    assert "Set ScorerReward.init_args.path to a reward model" in message


def test_encoder_without_a_head_is_refused(tmp_path):
    message = refusal(path=save_bert(tmp_path, kind=BertForMaskedLM))
    assert "is a BertForMaskedLM, whose weights lack" in message
    assert "classifier.weight" in message


def test_half_of_a_file_of_weights_is_refused(tmp_path):
    path = save_bert(tmp_path)
    file = Path(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "cannot be loaded as one: Error while deserializing header" in refusal(path=path)


def test_path_without_a_model_is_refused_without_a_request_to_the_hub(tmp_path):
    assert "does not exist" in refusal(path=str(tmp_path / "nothing"))
    assert "cannot be loaded as one" in refusal(path=str(tmp_path))


def test_model_without_its_tokenizer_is_refused(tmp_path):
    save_llama(tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    assert "and its tokenizer" in refusal(path=str(tmp_path))


def test_template_that_leaves_the_completion_out_is_refused(tmp_path):
    path = save_llama(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(path)
    assert "all completions of a prompt would get one value" in refusal(path=path)


def test_text_over_max_tokens_has_an_outcome_and_no_value(tmp_path):
    path = save_llama(tmp_path)
    reward = ScorerReward(path, max_tokens=10)
    ((fits, over),) = scores(reward, [prompt("1+1=")], ["123456", "1234567"])
    assert fits.is_ok
    assert over.outcome is Outcome.TRUNCATED
    assert over.detail == "prompt and completion have 11 tokens; max_tokens is 10"


def test_row_for_which_the_template_fails_is_the_only_error(tmp_path):
    path = save_llama(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if 'bad' in message['content'] %}"
        "{{ raise_exception('no bad words') }}{% endif %}{{ message['content'] }}{% endfor %}"
    )
    tokenizer.save_pretrained(path)
    ((first, bad, last),) = scores(ScorerReward(path), [chat()], ["a", "bad", "b"])
    assert first.is_ok
    assert last.is_ok
    assert bad.outcome is Outcome.ERROR
    assert "no bad words" in bad.detail


def test_unknown_token_is_an_error_of_its_row(tmp_path):
    path = save_llama(tmp_path, vocab_size=200, pad_token_id=None)
    unknown = next(c for c in map(chr, range(161, 2**11)) if max(encode(path, c)) >= 200)
    ((known, other),) = scores(ScorerReward(path), [prompt("1")], ["a", unknown])
    assert (known.outcome, other.outcome) == (Outcome.OK, Outcome.ERROR)
    assert "vocabulary of 200" in other.detail


def test_empty_text_is_an_error_of_its_row(tmp_path):
    ((empty, other),) = scores(ScorerReward(save_llama(tmp_path)), [prompt("")], ["", "b"])
    assert (empty.outcome, other.outcome) == (Outcome.ERROR, Outcome.OK)


def test_logits_of_another_shape_are_an_error(tmp_path):
    reward = ScorerReward(save_llama(tmp_path), timeout_seconds=60)
    with RewardSuite([reward]) as suite:
        reward._scorer.model.score = torch.nn.Linear(32, 2)
        (group,) = suite.score([prompt()], [[completion(text="a")]]).groups
    assert group.scores["scorer"][0].detail.endswith("gave logits [1, 2], not [1, 1]")
