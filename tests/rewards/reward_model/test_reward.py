"""Tiny real classifiers on disk, with the byte tokenizer."""

import asyncio
import dataclasses
import gc
import logging
import threading
import weakref
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from tiny import LLAMA, completion, prompt, tiny_policy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertTokenizer,
)

from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rewards import Reward, ScorerReward
from lit_grpo.rewards.reward_model.reward import _EqualRows, _Row
from lit_grpo.rewards.scoring import RewardSuite
from lit_grpo.types import Outcome, Prompt

TEXTS = ["2", "two, I think", "no", "", "it is 2\n", "a much longer answer: " + "1+1=2 " * 8]
CHARACTERS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##a", "##b"]
BERT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def save_llama(folder, *, kind=AutoModelForSequenceClassification, template=True, **settings):
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    if not template:
        tokenizer.chat_template = None
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_labels": 1}
    config = AutoConfig.for_model(**(LLAMA | tokens | settings))
    kind.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_bert(folder, kind=BertForSequenceClassification, **settings):
    """The tokenizer writes ``[CLS] prompt [SEP] completion [SEP]``, one token per character."""
    torch.manual_seed(0)
    tokenizer = BertTokenizer(vocab={token: number for number, token in enumerate(CHARACTERS)})
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    kind(BertConfig(**(BERT | tokens | {"num_labels": 1} | settings))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def chat(text="1+1=", id="p"):
    messages = ({"role": "user", "content": text},)
    return Prompt(id=id, text=f"<policy>{text}", token_ids=(1,), messages=messages)


def scores(reward, prompts, *groups):
    with RewardSuite([reward]) as suite:
        completions = [[completion(text=text) for text in group] for group in groups]
        batch = suite.score(prompts, completions)
    return [list(group.scores[reward.name]) for group in batch.groups]


def values(reward, prompt, texts=TEXTS):
    (group,) = scores(reward, [prompt], texts)
    return [score.value for score in group]


def plain_logits(path, *texts):
    """Return the logits of the model itself, on one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return [model(torch.tensor([encode(path, text)])).logits[0] for text in texts]


def encode(path, text):
    return AutoTokenizer.from_pretrained(path)(text)["input_ids"]


def refusal(**settings):
    with pytest.raises(ValueError, match=r".") as caught, RewardSuite([ScorerReward(**settings)]):
        pass
    return str(caught.value)


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


def test_every_setting_can_be_configured():
    parser = ArgumentParser()
    parser.add_argument("--reward", type=Reward)
    given = {"path": "rm", "label": "good", "batch_size": 4, "weight": 0.5, "on_error": "raise"}
    config = {"class_path": "lit_grpo.rewards.reward_model.reward.ScorerReward", "init_args": given}
    reward = parser.instantiate_classes(parser.parse_object({"reward": config})).reward
    reached = {**vars(reward), **dataclasses.asdict(reward.settings)}
    assert {name: reached[name] for name in given} == given


def test_settings_out_of_range_are_refused(tmp_path):
    path = save_llama(tmp_path)
    assert "must be <= 128" in refusal(path=path, max_tokens=129)
    assert "batch_size must be >= 1" in refusal(path=path, batch_size=0)
    assert "device must be one that this machine has" in refusal(path=path, device="abacus")


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


def test_error_of_the_model_fails_its_batch_and_later_rows_are_scored(tmp_path):
    # The position embeddings are shortened after loading, so that longer texts raise.
    reward = ScorerReward(save_bert(tmp_path), batch_size=1)
    with RewardSuite([reward]) as suite:
        embeddings = reward._scorer.model.bert.embeddings
        embeddings.position_embeddings = torch.nn.Embedding(20, 32)
        rows = [[completion(text=text) for text in ("a", "b" * 40, "ab")]]
        for _ in range(2):
            (group,) = suite.score([prompt("a")], rows).groups
            outcomes = [score.outcome for score in group.scores["scorer"]]
            assert outcomes == [Outcome.OK, Outcome.ERROR, Outcome.OK]


@pytest.mark.parametrize("error", [StopIteration, SystemExit, torch.OutOfMemoryError])
def test_no_exception_of_the_model_ends_the_scoring(tmp_path, error):
    def fail(*_):
        raise error

    reward = ScorerReward(save_llama(tmp_path), timeout_seconds=60)
    with RewardSuite([reward]) as suite:
        hook = reward._scorer.model.register_forward_pre_hook(fail)
        rows = [[completion(text=text) for text in ("a", "b", "long" * 40)]]
        (group,) = suite.score([prompt()], rows).groups
        outcomes = [score.outcome for score in group.scores["scorer"]]
        assert outcomes == [Outcome.ERROR, Outcome.ERROR, Outcome.TRUNCATED]
        hook.remove()
        assert suite.score([prompt()], rows).valid.tolist() == [[True, True, False]]


def test_logits_of_another_shape_are_an_error(tmp_path):
    reward = ScorerReward(save_llama(tmp_path), timeout_seconds=60)
    with RewardSuite([reward]) as suite:
        reward._scorer.model.score = torch.nn.Linear(32, 2)
        (group,) = suite.score([prompt()], [[completion(text="a")]]).groups
    assert group.scores["scorer"][0].detail.endswith("gave logits [1, 2], not [1, 1]")


def test_weights_that_are_not_finite_give_no_value(tmp_path):
    reward = ScorerReward(save_llama(tmp_path))
    with RewardSuite([reward]) as suite:
        reward._scorer.model.score.weight.fill_(float("nan"))
        (group,) = suite.score([prompt()], [[completion(text="a")]]).groups
    assert group.scores["scorer"][0].outcome is Outcome.ERROR


def check_that_a_policy_can_train():
    policy = tiny_policy()
    policy.model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.trainable_parameters())


def test_completions_that_arrive_one_by_one_share_forward_passes(tmp_path):
    path = save_llama(tmp_path)
    reward = ScorerReward(path, batch_size=8)
    prompts = [prompt("1+1=", id="a"), chat("2+2=", id="b"), prompt("3+3=", id="c")]
    sizes, busy, go = [], threading.Event(), threading.Event()

    def record(model, arguments, inputs):
        sizes.append(len(inputs["input_ids"]))
        busy.set()
        assert go.wait(60)

    with RewardSuite([reward]) as suite:
        reward._scorer.model.register_forward_pre_hook(record, with_kwargs=True)
        scoring = suite.open(prompts, 4)
        for row in (11, 0, 5, 7, 1, 2, 9, 3, 4, 6, 8, 10):
            scoring.add(row, completion(text=str(row)))
            assert busy.wait(60)
        check_that_a_policy_can_train()  # during a forward pass of the scorer
        go.set()
        got = scoring.result().rewards
    assert sizes == [1, 8, 3]
    texts = [f"1+1={row}" for row in range(4)]
    texts += [f"user: 2+2=\nassistant: {row}\n" for row in range(4, 8)]
    texts += [f"3+3={row}" for row in range(8, 12)]
    expected = torch.cat(plain_logits(path, *texts)).double().view(3, 4)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_event_loop_is_free_while_the_model_runs(tmp_path):
    reward = ScorerReward(save_llama(tmp_path))
    busy, go = threading.Event(), threading.Event()

    def block(*_):
        busy.set()
        assert go.wait(60)

    async def run():
        scoring = asyncio.ensure_future(reward.score(prompt(), completion(text="a")))
        while not busy.is_set():  # never ends if the model runs on this loop
            await asyncio.sleep(0.001)
        go.set()
        value = await scoring
        await reward.close()
        return value

    reward.start()
    reward._scorer.model.register_forward_pre_hook(block)
    assert isinstance(asyncio.run(run()), float)


def test_cancelled_row_does_not_affect_the_others(tmp_path):
    path = save_llama(tmp_path)
    reward = ScorerReward(path, batch_size=1)

    async def run():
        rows = [
            asyncio.ensure_future(reward.score(prompt("1+1="), completion(text=text)))
            for text in "abc"
        ]
        await asyncio.sleep(0)
        rows[1].cancel()
        done = await asyncio.gather(*rows, return_exceptions=True)
        await reward.close()
        return done

    reward.start()
    first, cancelled, last = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    expected = [logits.item() for logits in plain_logits(path, "1+1=a", "1+1=c")]
    assert [first, last] == pytest.approx(expected, abs=1e-5)


def test_close_ends_the_pass_in_flight_and_frees_the_model(tmp_path):
    reward = ScorerReward(save_llama(tmp_path), batch_size=1)
    busy, go, finished = threading.Event(), threading.Event(), []

    def block(*_):
        busy.set()
        assert go.wait(60)

    suite = RewardSuite([reward])
    suite.start()
    model = weakref.ref(reward._scorer.model)
    model().register_forward_pre_hook(block)
    model().score.register_forward_hook(lambda *_: finished.append(1))
    thread = reward._thread
    scoring = suite.open([prompt()], 2)
    scoring.add(0, completion(text="a"))
    assert busy.wait(60)
    scoring.add(1, completion(text="b"))
    suite.close()  # while the model is busy
    go.set()
    thread.shutdown()
    gc.collect()
    assert model() is None
    assert scoring.is_cancelled
    assert not finished  # the pass in flight ended before its last layer
    with pytest.raises(RuntimeError, match="not started"):
        asyncio.run(reward.score(prompt(), completion(text="a")))


def test_reward_can_be_started_again_after_close(tmp_path):
    reward = ScorerReward(save_llama(tmp_path))
    assert values(reward, prompt()) == pytest.approx(values(reward, prompt()), abs=1e-6)


def test_global_state_of_torch_is_unchanged(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    path = save_llama(tmp_path)
    torch.set_rng_state(before)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    values(ScorerReward(path, dtype="bfloat16"), prompt())
    assert torch.equal(torch.get_rng_state(), before)
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def save_constant(folder):
    path = save_llama(folder)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    model.score.weight.data.zero_()
    model.save_pretrained(path)
    return path


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if "in a row" in record.getMessage()]


def test_scorer_with_constant_values_is_warned_about_at_16_and_32_rows(tmp_path, caplog):
    prompts = [chat(f"{n}+1=", id=str(n)) for n in range(5)]
    groups = [[f"{n} {row}" for row in range(8)] for n in range(5)]
    with caplog.at_level(logging.WARNING):
        scores(ScorerReward(save_constant(tmp_path)), prompts, *groups)
    first, second = warnings(caplog)  # of 40 rows 35 have an earlier sibling
    assert "gave 16 completions in a row the value of another completion" in first
    assert "gave 32 completions in a row" in second
    assert "nothing is learned" in first
    assert "The end of its last input: …user: " in first


def test_scorer_with_different_values_is_not_warned_about(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        values(ScorerReward(save_llama(tmp_path)), prompt(), [str(n) for n in range(40)])
    assert not warnings(caplog)


def test_count_of_equal_rows_restarts_after_two_different_values():
    equal_rows = _EqualRows()
    # 15 rows are equal to the first one, then one differs, then 16 and 17 are equal.
    given = [1.0] * 16 + [2.0] + [1.0] * 17 + [1.00001]
    rows = [
        _Row(prompt=prompt(), completion=completion(text=str(n)), result=None)
        for n in range(len(given))
    ]
    due = [equal_rows.add(row, value) for row, value in zip(rows, given, strict=True)]
    assert [n for n, is_due in enumerate(due) if is_due] == [33]


def test_equal_completions_of_a_prompt_are_not_counted(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        values(ScorerReward(save_llama(tmp_path)), prompt(), ["same"] * 40)
    assert not warnings(caplog)
