"""The reasoning is stripped alike in training, held-out accuracy, ``rewards`` and ``rescore``."""

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml
from chat_models import ALWAYS_THINKS, qwen_tokenizer
from cli_base import BASE

from lit_grpo.__main__ import main

MINE = """
from lit_grpo.rewards import Reward

class IsEmpty(Reward):
    def score(self, prompt, completion):
        return float(not completion.text and not completion.token_ids)
"""
STRIPPED = {"class_path": "seen_rewards.IsEmpty", "init_args": {"reasoning": "strip"}}
WHOLE = {"class_path": "seen_rewards.IsEmpty", "init_args": {"name": "whole"}}


@pytest.fixture
def config(here) -> dict:
    """A run whose chat template opens a thought, which random weights do not end."""
    Path("seen_rewards.py").write_text(MINE)
    rows = [{"prompt": f"{n}+{n}?", "answer": str(2 * n)} for n in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    qwen_tokenizer(ALWAYS_THINKS).save_pretrained("tokenizer")
    model = BASE["model"] | {
        "policy": BASE["model"]["policy"] | {"tokenizer": "tokenizer"},
        "rewards": [STRIPPED, WHOLE],
        "evaluation": {"accuracy": STRIPPED, "before_training": True},
    }
    settings = {"train": "rows.jsonl", "validation_size": 2, "prompts_per_step": 2, "chat": True}
    data = {"class_path": "PromptData", "init_args": settings}
    return BASE | {"model": model, "data": data}


def columns(path: str) -> tuple[list[float], list[float]]:
    table = pd.read_parquet(path)
    assert table["completion"].str.len().min() > 0  # the text of the thought is kept
    assert table["token_ids"].str.len().min() == 3
    return table["score/is_empty"].tolist(), table["score/whole"].tolist()


def test_every_command_hides_the_reasoning_from_the_rewards_that_strip_it(config, capsys):
    Path("my.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config=my.yaml", "--run_dir=run"]) == 0
    assert columns("run/completions/step_000000.parquet") == ([1.0] * 4, [0.0] * 4)
    assert pd.read_csv("run/metrics.csv")["val/accuracy"].dropna().tolist()[0] == 1.0
    assert main(["rescore", "run"]) == 0
    assert "Nothing changed" in capsys.readouterr().out
    assert columns("run/rescored/rescored.parquet") == ([1.0] * 8, [0.0] * 8)
    assert main(["rewards", "--config=my.yaml", "--run_dir=trial", "--n=2"]) == 0
    assert columns("trial/rewards.parquet") == ([1.0] * 4, [0.0] * 4)


def test_a_policy_without_reasoning_tags_hides_nothing(config):
    config["model"]["policy"]["reasoning_tags"] = None
    Path("my.yaml").write_text(yaml.safe_dump(config))
    assert main(["rewards", "--config=my.yaml", "--run_dir=trial", "--n=2"]) == 0
    assert columns("trial/rewards.parquet") == ([0.0] * 4, [0.0] * 4)


@pytest.mark.parametrize("tags", [["<a>", "<a>"], ["", "</a>"]])
def test_tags_that_cannot_be_told_apart_are_refused(config, tags, capsys):
    config["model"]["policy"]["reasoning_tags"] = tags
    Path("my.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config=my.yaml"]) == 2
    assert "reasoning_tags must be two different texts, or null" in capsys.readouterr().err
