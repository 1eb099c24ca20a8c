"""What a vLLM server replies to the requests of a teacher."""

from __future__ import annotations

import threading
from typing import Any

import torch


def vllm_replies(policy, *, max_logprobs: int = 20) -> dict[str, Any]:
    """Return replies for `http_answers` in vLLM's format, from a policy in this process."""
    policy.load(with_reference=False)
    lock = threading.Lock()

    def tokenize(body):
        assert body["model"] == "the-teacher"
        ids = policy.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return 200, {"tokens": ids["input_ids"]}

    def complete(body):
        num = body["prompt_logprobs"]
        if num > max_logprobs:
            return 400, {"error": f"prompt logprobs of {num} exceed {max_logprobs}"}
        with lock, torch.no_grad():
            logprobs = policy.model(torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
        entries = [None]
        for position, token in enumerate(body["prompt"][1:]):
            ids = [token, *logprobs[position].topk(num).indices.tolist()]
            entries.append({str(id): {"logprob": float(logprobs[position, id])} for id in ids})
        return 200, {"choices": [{"text": "?", "prompt_logprobs": entries}]}

    return {
        "GET /v1/models": {"data": [{"id": "the-teacher", "max_model_len": 100}]},
        "POST /tokenize": tokenize,
        "POST /v1/completions": complete,
    }
