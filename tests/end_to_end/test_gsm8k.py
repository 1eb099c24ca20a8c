"""The shipped config on GSM8K's real files, with a small model of random weights."""

import re

import pandas as pd
import pytest
import yaml
from paths import GSM8K
from transformers import AutoModelForCausalLM

NUM_STEPS = 8
SMALL = {
    "trainer": {
        "precision": "32-true",
        "max_steps": NUM_STEPS,
        "val_check_interval": NUM_STEPS // 2,
    },
    "model": {
        "policy": {
            "path": None,
            "architecture": {
                "model_type": "qwen2",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 1024,
                "initializer_range": 0.1,
            },
        },
        # Random weights solve nothing, so they are also rewarded for completions that end early.
        "rewards": [
            {"class_path": "MathReward"},
            {
                "class_path": "LengthReward",
                "init_args": {"start_tokens": 4, "end_tokens": 24, "weight": 0.1},
            },
        ],
        "group_size": 4,
        "sampling": {"max_tokens": 24},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.001}},
    },
    "data": {
        "class_path": "PromptData",
        "init_args": {
            "train": str(GSM8K / "train.jsonl"),
            "validation": str(GSM8K / "test.jsonl"),
            "prompts_per_step": 4,
            "validation_batch_size": 16,
            "max_prompt_tokens": 300,
        },
    },
}


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_dir(), reason="the files of GSM8K are not beside the checkout")
def test_the_shipped_config_trains_on_gsm8k(tmp_path, importer):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    arguments = ["--config", "gsm8k", "--config", "small.yaml", "--run_dir", "run"]
    arguments += ["--trainer.limit_val_batches", "1", "--model.evaluation.num_samples", "2"]
    importer.run(["fit", *arguments], tmp_path, seconds=280)
    log = (tmp_path / "run" / "run.log").read_text()
    assert not re.search(r"py\.warnings|WARNING lightning", log)
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert metrics["step"].tolist() == [-1, *range(NUM_STEPS)]
    assert metrics["val/accuracy"].notna().sum() >= 2
    assert metrics["policy/grad_norm"].max() > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    tables = [pd.read_parquet(file) for file in (tmp_path / "run" / "completions").iterdir()]
    completions = pd.concat(tables)
    assert len(completions) == NUM_STEPS * 4 * 4
    assert completions["prompt"].str.contains("Reason step by step").all()
    assert completions["answer"].str.fullmatch(r"-?[\d.]+").all()
