"""A byte tokenizer with the special tokens and the chat template of a Qwen3 base model."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import LLAMA
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from lit_grpo.data import PromptFormat, Row
from lit_grpo.data.prompts.prompt_format import build_prompts
from lit_grpo.policy import Policy
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.types import Prompt

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
ALWAYS_THINKS = TEMPLATE.replace("assistant\n", "assistant\n<think>\n").replace(
    "<think>\n\n</think>\n\n", ""
)
"""A template that itself opens the thought."""


def qwen_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose end of text, ``<eos>``, is not the end of a turn."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=True) for text in (IM_START, IM_END)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tokenizer.chat_template = template
    return tokenizer


def qwen_policy(directory: Path, template: str = TEMPLATE, **settings) -> Policy:
    """Return a policy with random weights and this tokenizer."""
    qwen_tokenizer(template).save_pretrained(directory)
    return Policy(architecture=LLAMA, tokenizer=str(directory), **settings)


def chat_prompts(tokenizer, *rows: dict, **settings) -> list[Prompt]:
    """Return the prompts of rows as the data module makes them, each a conversation."""
    found = [
        Row(source="t.jsonl", number=number, id=f"t:{number}", columns=columns)
        for number, columns in enumerate(rows, start=1)
    ]
    settings = {"chat": True, "require_answer": False} | settings
    return build_prompts(found, tokenizer, PromptFormat(**settings))


def turn_ending_policy(directory: Path, prompt: Prompt) -> Policy:
    """Return a policy whose greedy completion of this prompt ends the turn at its fourth token."""
    torch.manual_seed(0)
    policy = qwen_policy(directory)
    policy.load(with_reference=False)
    ids = policy.model.generate(
        torch.tensor([prompt.token_ids]), do_sample=False, max_new_tokens=4, min_new_tokens=4
    )[0, -4:]
    assert ids[3] not in ids[:3]
    pair = [int(ids[3]), policy.tokenizer.convert_tokens_to_ids(IM_END)]
    with torch.no_grad():
        head = policy.model.lm_head.weight
        head[pair] = head[pair[::-1]].clone()
    return policy
