"""A policy that cannot be loaded, which ``lit-grpo doctor`` finds before a run does."""

from __future__ import annotations

import json

from doctor_runs import doctor, policy_from, rewarded, write_rows
from tiny import tiny_policy

from lit_grpo.policy.byte_tokenizer import byte_tokenizer


def test_a_model_that_is_not_there_is_one_failed_check_and_the_others_go_on(capsys):
    rows = write_rows({"prompt": "1+1="})
    exit_code, shown = doctor(capsys, *policy_from("./nowhere/final"), *rows)
    assert exit_code == 1
    assert "there is no such directory" in shown["model"]
    assert "Set model.policy.path" in shown["model"]
    assert "1 rows can be read. Their prompts and gold answers were not checked" in shown["data"]
    assert "ok" not in shown["data"].split()
    assert "Not checked" in shown["memory"]
    assert "2 prompts x 2 completions" in shown["batch"]
    assert shown["summary"].strip() == "Do not start yet: model failed."


def test_a_model_without_weights_is_failed(here, capsys):
    tiny_policy().save_pretrained(here / "model")
    (here / "model" / "model.safetensors").unlink()
    exit_code, shown = doctor(capsys, *policy_from("model"))
    assert exit_code == 1
    assert "model has a config but no weights" in shown["model"]


def test_a_model_with_fewer_embeddings_than_tokens_is_failed(here, capsys):
    tiny_policy().save_pretrained(here / "model")
    config = here / "model" / "config.json"
    smaller = {"vocab_size": 200, "pad_token_id": None, "eos_token_id": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | smaller))
    exit_code, shown = doctor(capsys, *policy_from("model"))
    assert exit_code == 1
    assert "got 200 embeddings, for the tokens 0 to 199, and token 256 ('<eos>')" in shown["model"]


def test_half_of_a_file_of_weights_is_failed(here, capsys):
    tiny_policy().save_pretrained(here / "model")
    file = here / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    exit_code, shown = doctor(capsys, *policy_from("model"))
    assert exit_code == 1
    assert "model/model.safetensors is damaged or was not copied whole" in shown["model"]


def test_a_tokenizer_with_which_nothing_ends_is_a_remark_and_the_probe_does_not_blame_the_limit(
    here, capsys
):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(here / "tokenizer")
    settings = ("--model.policy.tokenizer=tokenizer", "--model.sampling.stop_token_ids=[]")
    reward = rewarded("code_rewards.Constant", value=0.0)
    exit_code, shown = doctor(capsys, "--probe", reward, *settings)
    assert exit_code == 0
    assert "nothing ends a completion: neither the tokenizer nor the model's" in shown["model"]
    assert "100% cut off" in shown["probe"]
    assert "Raise model.sampling.max_tokens" not in shown["probe"]


def test_a_tokenizer_with_neither_end_nor_padding_is_failed(here, capsys):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(here / "tokenizer")
    exit_code, shown = doctor(capsys, "--model.policy.tokenizer=tokenizer")
    assert exit_code == 1
    assert "must have an end-of-sequence token" in shown["model"]
