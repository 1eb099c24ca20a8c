from __future__ import annotations

import json
import re

import pytest

from lit_grpo.runs.files.secrets import change_without_secrets, without_secrets


def test_secrets_are_removed_and_other_settings_are_not():
    kept = {
        "secret_variable": "OPENAI_API_KEY",
        "max_tokens": 6,
        "stop_token_ids": [1, 2],
        "tokenizer": "someone/tiny",
        "auth": "key",
        "base_url": "https://judge.example/v1",
    }
    secret = {
        "env": {"HF_TOKEN": "hf_1"},
        "flags": {"api-key": "sk-1"},
        "extra_body": {"headers": {"Authorization": "Bearer sk-2"}, "api_keys": ["sk-3"]},
        "urls": ["https://user:sk-4@judge.example/v1?sig=sk-5"],
    }
    shown = without_secrets(kept | secret)
    assert {name: shown[name] for name in kept} == kept
    assert not re.search("hf_1|sk-", json.dumps(shown))
    assert shown["urls"] == ["https://judge.example/v1"]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("model.group_size: 4 -> 8", None),
        ("model.sampling.max_tokens: 2 -> 1", None),
        ("model.sampling.stop: ['a'] -> None", None),
        ("data.rows: 8 (checksum 1a) -> 9 (checksum 2b)", None),
        ("model.r.api_key: sk-1 -> sk-2", "model.r.api_key: (removed) -> (removed)"),
        ("model.r.headers: {'key': 'sk-1'} -> {}", "model.r.headers: {'key': '(removed)'} -> {}"),
        (
            "model.r.base_url: https://me:sk-3@old.example/v1 -> https://new.example/v1?key=sk-4",
            "model.r.base_url: https://old.example/v1 -> https://new.example/v1",
        ),
    ],
)
def test_a_change_is_told_without_secrets(change, shown):
    assert change_without_secrets(change) == (shown or change)
