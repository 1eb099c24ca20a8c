"""What is estimated of reward models is what they take while they score."""

from __future__ import annotations

import pytest
from live_bytes import LiveBytes
from tiny import LLAMA, completion, prompt
from transformers import AutoConfig, AutoModelForSequenceClassification

from lit_grpo.cli.estimate.model_sizes import weight_bytes
from lit_grpo.cli.estimate.scorers import _is_beside, scorer_bytes
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rewards import ScorerReward
from lit_grpo.rewards.reward_model.model import load_scorer
from lit_grpo.rewards.reward_model.reward import _Row

WIDE = {"hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 512}
NUM_ROWS = 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_what_weights_and_a_batch_take(dtype, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(**(LLAMA | WIDE | tokens), num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = ScorerReward(str(tmp_path), dtype=dtype, device="cpu", batch_size=NUM_ROWS)
    weights, batch = scorer_bytes([reward], 400, None)
    scorer = load_scorer(reward.settings)
    assert weights == weight_bytes(scorer.model)
    rows = [
        _Row(prompt=prompt("a" * 200), completion=completion(text="b" * length), result=None)
        for length in (200, *[100] * (NUM_ROWS - 1))
    ]
    with LiveBytes() as measured:
        scores = scorer.score(rows)
    assert all(isinstance(one, float) for one in scores)
    assert 0.95 < batch / measured.peak < 1.3


@pytest.mark.parametrize(
    ("device", "gpus", "is_beside"),
    [
        ("auto", ["1"], True),
        ("cuda", ["1"], True),
        ("cuda:1", ["1"], True),
        ("cuda:0", ["1"], False),
        ("cpu", ["1"], False),
        ("auto", None, True),
        ("cpu", None, True),
    ],
)
def test_a_reward_model_counts_where_the_trainer_is(device, gpus, is_beside):
    assert _is_beside(device, gpus) == is_beside
