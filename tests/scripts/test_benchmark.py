"""The benchmark's arithmetic, and tiny runs of its parts. It is a script, not a package."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import multiprocessing
from dataclasses import replace

import pytest
import torch

pytest.importorskip("trl")
accuracy, parts, results, steps, turns, workloads = (
    importlib.import_module(f"_benchmark.{name}")
    for name in ("accuracy", "parts", "results", "steps", "turns", "workloads")
)

TINY = workloads.SIZES["tiny"]
SHORT = replace(
    workloads.WORKLOADS["short_equal"], num_prompts=2, group_size=2, prompt_tokens=6, max_tokens=4,
    micro_batch_rows=(4,),
)  # fmt: skip
VARIED = workloads.WORKLOADS["short_varied"]
EFFORT = turns.Effort(rounds=2, steps=1)


def result(ours=1.0, other=2.0, target=None, **settings):
    named = {"figure": "step", "case": "a", "against": "b", "unit": "s"} | settings
    return results.Result(ours=ours, other=other, target=target, **named)


# What is timed


def test_lengths_cut_off_at_their_maximum_have_the_mean_that_is_asked_for():
    goes_on = 1 - workloads.eos_probability(VARIED)
    mean = sum(goes_on**tokens for tokens in range(VARIED.max_tokens))
    assert mean == pytest.approx(VARIED.mean_tokens, rel=1e-6)


@pytest.mark.parametrize("workload", [SHORT, VARIED], ids=lambda workload: workload.name)
def test_the_end_of_a_completion_is_as_likely_after_any_token(workload):
    torch.manual_seed(0)
    model = workloads.build_model(workload, TINY).eval()
    logits = model(input_ids=torch.randint(2, TINY.vocab_size, (4, 24))).logits
    likely = logits.softmax(-1)[..., workloads.EOS]
    wanted = workloads.eos_probability(workload)
    assert likely.mean().item() == pytest.approx(wanted, rel=0.2)
    assert (likely == 0).all() or likely.max() < 3 * likely.min()


def test_a_prompt_has_as_many_tokens_as_the_workload_says(tmp_path):
    workloads.prepare(SHORT, TINY, 3, tmp_path)
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").open()]
    ids = workloads.word_tokenizer(TINY.vocab_size)(rows)["input_ids"]
    assert [len(one) for one in ids] == [SHORT.prompt_tokens] * 3 * SHORT.num_prompts
    assert min(map(min, ids)) > workloads.PAD


def test_trl_gets_the_quickstart_s_settings(tmp_path):
    quickstart = accuracy.bundled("quickstart")
    task = accuracy.trl_task(tmp_path, quickstart, 128, tmp_path)
    settings = task.settings
    rows = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    assert rows == 256 * 4
    assert settings["learning_rate"] == quickstart["model"]["optimizer"]["init_args"]["lr"]
    assert quickstart["model"]["advantage"] == {"deviation": "none"}
    assert settings["scale_rewards"] == "none"
    assert {"prompt", "answer"} <= task.rows[0].keys()


def test_trl_gets_the_quickstart_s_reward():
    rewards = accuracy.math_reward(completions=["46", "47", "?"], answer=["46"] * 3)
    assert asyncio.run(rewards) == [1.0, 0.0, 0.0]


# How it is timed


def test_a_metronome_lets_a_trainer_make_as_many_steps_as_it_is_asked_for():
    here, there = multiprocessing.Pipe()
    metronome = turns.Metronome(there)
    for request in (2, "measure", 1):
        here.send(request)
    metronome.measure = lambda: 0.5
    for number in range(4):
        if number == 3:
            here.close()
            with pytest.raises((SystemExit, ConnectionError)):
                metronome.beat()
            break
        metronome.beat()
        metronome.add("update", number)
        metronome.add("update", 1.0)
        if number == 2:
            assert here.recv() == []  # ready
            laps = here.recv()
            assert [lap.stages["update"] for lap in laps] == [1.0, 2.0]
            assert all(lap.seconds > 0 for lap in laps)
            assert here.recv() == 0.5


def test_a_trainer_that_fails_is_reported_with_its_last_words(tmp_path):
    with (
        pytest.raises(RuntimeError, match="ended before its time"),
        turns.contest({"nobody": (steps.bare_update, None)}, tmp_path),
    ):
        pass


# What is told


def test_a_ratio_is_judged_by_its_target():
    assert result().is_met is None
    assert result(target=0.5).is_met is True
    assert result(target=0.4).is_met is False


def test_a_figure_that_is_taken_again_replaces_the_earlier_one(tmp_path):
    path = tmp_path / "results.json"
    results.keep([result(ours=1.0).to_row(), result(case="c").to_row()], path)
    results.keep([result(ours=1.5).to_row()], path)
    rows = json.loads(path.read_text())
    assert [(row["case"], row["ratio"]) for row in rows] == [("a", 0.75), ("c", 0.5)]
    assert rows[0]["machine"]["torch"] == torch.__version__


def test_tables_hold_every_figure_with_its_details_and_command():
    details = {"trl": {"update": 1.25, "arrived": "no"}}
    text = results.markdown([result(target=0.4, details=details).to_row()])
    assert "| a | 1.000 s | 2.000 s | 0.500 | ≤ 0.400 | no |" in text
    assert "| a trl | 1.250 | no |" in text
    assert "python scripts/benchmark.py" in text


# Tiny runs


def test_the_engine_and_generate_sample_what_the_workload_says():
    (figure,) = parts.compare_engine(SHORT, TINY, EFFORT)
    lengths = {name: row["mean length"] for name, row in figure.details.items()}
    assert lengths == {"HFEngine": SHORT.max_tokens, "model.generate": SHORT.max_tokens}
    assert math.isfinite(figure.ratio)


@pytest.mark.slow
def test_a_step_is_timed_beside_trl_and_a_bare_update():
    figures = {figure.figure: figure for figure in steps.compare_steps(SHORT, TINY, EFFORT)}
    assert figures.keys() == {"step", "update", "overhead"}
    details = figures["step"].details
    assert details.keys() == {"lit-grpo 4", "trl 4", "bare 4"}
    for name in ("lit-grpo 4", "trl 4"):
        row = details[name]
        assert row["mean length"] == SHORT.max_tokens
        assert min(row["generation"], row["update"], row["rest"]) > 0
        assert sum(row[stage] for stage in (*turns.STAGES, "rest")) < 2 * row["step"]
