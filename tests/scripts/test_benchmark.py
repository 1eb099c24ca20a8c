"""The benchmark's arithmetic, and tiny runs of its parts."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import multiprocessing
import time
from dataclasses import replace

import pytest
import torch

from lit_grpo.cli.parsing.config_files import find_config, read_config

pytest.importorskip("trl")
accuracy, parts, processes, results, steps, workloads = (
    importlib.import_module(f"_benchmark.{name}")
    for name in ("accuracy", "parts", "processes", "results", "steps", "workloads")
)
comparison, findings = (
    importlib.import_module(f"_gpu_check.{name}") for name in ("comparison", "findings")
)

TINY = workloads.SIZES["tiny"]
SHORT = replace(
    workloads.WORKLOADS["short_equal"], num_prompts=2, group_size=2, prompt_tokens=6, max_tokens=4,
    micro_batch_rows=(4,),
)  # fmt: skip
VARIED = workloads.WORKLOADS["short_varied"]
REPETITIONS = processes.Repetitions(rounds=2, steps=1)


def result(ours=1.0, other=2.0, target=None, **settings):
    named = {"figure": "step", "case": "a", "against": "b", "unit": "s"} | settings
    return results.Result(ours=ours, other=other, target=target, **named)


# Workloads


def test_truncated_lengths_have_the_requested_mean():
    continues = 1 - workloads.eos_probability(VARIED)
    mean = sum(continues**tokens for tokens in range(VARIED.max_tokens))
    assert mean == pytest.approx(VARIED.mean_tokens, rel=1e-6)


@pytest.mark.parametrize("workload", [SHORT, VARIED], ids=lambda workload: workload.name)
def test_eos_is_equally_likely_after_any_token(workload):
    torch.manual_seed(0)
    model = workloads.build_model(workload, TINY).eval()
    logits = model(input_ids=torch.randint(2, TINY.vocab_size, (4, 24))).logits
    probability = logits.softmax(-1)[..., workloads.EOS]
    expected = workloads.eos_probability(workload)
    assert probability.mean().item() == pytest.approx(expected, rel=0.2)
    assert (probability == 0).all() or probability.max() < 3 * probability.min()


def test_a_prompt_has_as_many_tokens_as_the_workload_says(tmp_path):
    workloads.write_inputs(SHORT, TINY, 3, tmp_path)
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").open()]
    ids = workloads.word_tokenizer(TINY.vocab_size)(rows)["input_ids"]
    assert [len(one) for one in ids] == [SHORT.prompt_tokens] * 3 * SHORT.num_prompts
    assert min(map(min, ids)) > workloads.PAD


def test_trl_gets_the_settings_of_the_quickstart(tmp_path):
    quickstart = read_config(find_config("quickstart"))
    task = accuracy.trl_task(tmp_path, quickstart, 128, tmp_path)
    settings = task.settings
    rows = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    assert rows == 256 * 4
    assert settings["learning_rate"] == quickstart["model"]["optimizer"]["init_args"]["lr"]
    assert quickstart["model"]["advantage"] == {"deviation": "none"}
    assert settings["scale_rewards"] == "none"
    assert {"prompt", "answer"} <= task.rows[0].keys()


def test_trl_gets_the_reward_of_the_quickstart():
    rewards = accuracy.math_reward(completions=["46", "47", "?"], answer=["46"] * 3)
    assert asyncio.run(rewards) == [1.0, 0.0, 0.0]


# Timing


def test_a_step_timer_lets_a_trainer_make_as_many_steps_as_requested():
    here, there = multiprocessing.Pipe()
    timer = processes.StepTimer(there)
    timer.evaluate = lambda: 0.5
    for request in (2, "evaluate", 1):
        here.send(request)
    for number in range(3):
        timer.next_step()
        timer.add("update", number)
        timer.add("update", 1.0)
    assert here.recv() == []  # ready
    timings = here.recv()
    assert [timing.stages["update"] for timing in timings] == [1.0, 2.0]
    assert all(timing.seconds > 0 for timing in timings)
    assert here.recv() == 0.5
    here.close()
    with pytest.raises((SystemExit, ConnectionError)):
        timer.next_step()


@pytest.mark.slow
def test_a_trainer_that_fails_is_reported_with_the_end_of_its_log(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"(?s)broken ended early.*AttributeError"),
        processes.started({"broken": (steps.bare_update, None)}, tmp_path),
    ):
        pass


# Results


def test_a_ratio_is_judged_by_its_target():
    assert result().is_met is None
    assert result(target=0.5).is_met is True
    assert result(target=0.4).is_met is False


def test_a_figure_that_is_measured_again_replaces_the_earlier_one(tmp_path):
    path = tmp_path / "results.json"
    results.save([result(ours=1.0).to_row(), result(case="c").to_row()], path)
    results.save([result(ours=1.5).to_row()], path)
    rows = json.loads(path.read_text())
    assert [(row["case"], row["ratio"]) for row in rows] == [("a", 0.75), ("c", 0.5)]
    assert rows[0]["machine"]["torch"] == torch.__version__


def test_tables_have_every_figure_with_its_details_and_command():
    details = {"trl": {"update": 1.25, "reached": "no"}}
    text = results.markdown([result(target=0.4, details=details).to_row()])
    assert "| a | 1.000 s | 2.000 s | 0.500 | ≤ 0.400 | no |" in text
    assert "| a trl | 1.250 | no |" in text
    assert "python scripts/benchmark.py" in text


# Tiny runs


def test_the_engine_and_generate_sample_the_lengths_of_the_workload():
    (figure,) = parts.compare_engine(SHORT, TINY, REPETITIONS)
    lengths = {name: row["mean length"] for name, row in figure.details.items()}
    assert lengths == {"HFEngine": SHORT.max_tokens, "model.generate": SHORT.max_tokens}
    assert math.isfinite(figure.ratio)


def test_chunked_head_and_full_logits_have_the_same_gradient():
    gradients = []
    ids = torch.randint(2, TINY.vocab_size, (3, 5), generator=torch.Generator().manual_seed(0))
    policy = parts.loaded_policy(SHORT, TINY)
    for run in (parts.chunked_head, parts.full_logits):
        policy.model.zero_grad()
        run(policy, ids)
        gradients.append(policy.model.lm_head.weight.grad.clone())
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0


@pytest.mark.slow
def test_a_step_is_timed_beside_trl_and_a_bare_update_as_the_gpu_check_does(monkeypatch, tmp_path):
    figures = {}

    def compare_steps(*arguments):
        for figure in steps.compare_steps(*arguments):
            figures[figure.figure] = figure
            yield figure

    monkeypatch.setattr(comparison, "compare_steps", compare_steps)
    monkeypatch.setattr(comparison, "WORKLOADS", {"short_equal": SHORT})
    monkeypatch.setattr(comparison, "REPETITIONS", REPETITIONS)
    recorder = findings.Recorder("trl", tmp_path / "records", time.monotonic() + 600)
    comparison.compare(recorder, is_tiny=True)
    recorded = findings.read(recorder.path)
    assert {one["kind"] for one in recorded} == {"figure"}  # and no failure
    assert [one["value"] for one in recorded] == [one.ratio for one in figures.values()]
    assert figures.keys() == {"step", "update", "overhead"}
    details = figures["step"].details
    assert details.keys() == {"lit-grpo 4", "trl 4", "bare 4"}
    for name in ("lit-grpo 4", "trl 4"):
        row = details[name]
        assert row["mean length"] == SHORT.max_tokens
        assert min(row["generation"], row["update"], row["rest"]) > 0
        assert sum(row[stage] for stage in (*processes.STAGES, "rest")) < 2 * row["step"]
