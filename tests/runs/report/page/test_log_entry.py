from __future__ import annotations

from logged_runs import write_run

from lit_grpo.runs.report.history import load_runs
from lit_grpo.runs.report.page.diagnosis import diagnose
from lit_grpo.runs.report.page.log_entry import log_entry

CONFIG = {
    "trainer": {"max_steps": 40},
    "model": {
        "policy": {"class_path": "lit_grpo.Policy", "init_args": {"path": "Qwen/Qwen3-0.6B"}},
        "rewards": [
            {"class_path": "lit_grpo.MathReward", "init_args": {"weight": 1.0}},
            {"class_path": "lit_grpo.FormatReward", "init_args": {"weight": 0.5}},
            "LengthReward",
        ],
        "group_size": 8,
        "objective": {"surrogate": "clip", "kl": {"coef": 0.01}},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-06}},
    },
    "data": {"class_path": "lit_grpo.PromptData", "init_args": {"train": "train.jsonl"}},
}
EVENTS = [
    {"step": 0, "kind": "start"},
    {"step": 1, "kind": "alert", "cause": "truncated", "message": "x"},
    {"step": 1, "kind": "warning", "cause": "slow_stage", "message": "x"},
    {"step": 2, "kind": "warning", "cause": "slow_stage", "message": "x"},
    {"step": 2, "kind": "stop", "message": "Ended by SIGTERM\nafter 2 steps."},
]
METRICS = {
    "val/accuracy": [0.25, 0.875],
    "reward/mean": [0.5, 0.75],
    "perf/tokens_per_second": [1000, 500],
    "timing/step_duration_s": [2.0, 4.0],
}


def entry(run_dir):
    (run,) = load_runs([run_dir])
    return log_entry(run, diagnose(run)).splitlines()


def test_an_entry_says_what_a_run_was_and_what_came_out_of_it(tmp_path):
    run = write_run(tmp_path / "math" / "0", METRICS, events=EVENTS, config=CONFIG)
    assert entry(run) == [
        "## math/0",
        "",
        "- **Date:** 2026-11-23 16:05",
        "- **Model:** `Qwen/Qwen3-0.6B`",
        "- **Data:** PromptData, train train.jsonl",
        "- **Rewards:** MathReward, FormatReward × 0.5, LengthReward",
        "- **Settings:** group_size 8, lr 1e-06, surrogate clip, kl.coef 0.01, max_steps 40",
        "- **Steps:** 2 in 3 s, 4.0 k tokens",
        "- **Held-out accuracy:** 0.250 → 0.875",
        "- **Reward:** 0.500 → 0.750",
        "- **End:** Ended by SIGTERM after 2 steps.",
        "- **Alerts:** truncated × 1",
        "- **Warnings:** slow_stage × 2",
        "- **Notes:** ",
    ]


def test_a_model_that_was_built_is_told_by_its_architecture(tmp_path):
    architecture = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    config = {"model": {"policy": {"path": None, "architecture": architecture}}}
    lines = entry(write_run(tmp_path / "run" / "0", {"sft/loss": [2.0, 1.0]}, config=config))
    assert "- **Model:** new, model_type llama, hidden_size 64, num_hidden_layers 2" in lines
    assert "- **SFT loss:** 2.000 → 1.000" in lines


def test_a_run_without_a_config_has_an_entry(tmp_path):
    lines = entry(write_run(tmp_path / "run" / "0", {"reward/mean": [0.5]}))
    assert lines[2] == "- **Steps:** 1 in 2 s"
