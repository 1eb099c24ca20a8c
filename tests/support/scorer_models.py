"""Tiny real classifiers on disk, and the scores that rewards give with them."""

import pytest
import torch
from tiny import LLAMA, completion
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
)

from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rewards import ScorerReward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Prompt

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
