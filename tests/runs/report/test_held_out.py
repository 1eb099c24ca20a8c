"""Accuracies that were measured on different held-out prompts are not compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from logged_runs import write_run
from run_logs import workplace

from lit_grpo.__main__ import main
from lit_grpo.runs.files.event_log import read_events
from lit_grpo.runs.report.held_out import held_out_hashes
from lit_grpo.runs.report.history import load_runs

METRICS = "step,seconds,val/accuracy\n0,1,0.25\n1,2,0.5\n2,3,0.75\n"


def make_run(path: Path, *held_out: tuple[int, str], started_from: Path | None = None) -> Path:
    """Write a run that was started, and resumed at these steps, with these held-out prompts."""
    path.mkdir(parents=True)
    (path / "metrics.csv").write_text(METRICS)
    kinds = ["start", *["resume"] * len(held_out)]
    events = [
        {"time": "2026-11-23T16:05:01", "step": step, "kind": kind, "held_out": one}
        for (step, one), kind in zip(held_out, kinds, strict=False)
    ]
    (path / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
    policy = {"path": str(started_from / "final")} if started_from else {}
    (path / "config.yaml").write_text(yaml.safe_dump({"model": {"policy": policy}}))
    return path


def reported(capsys, *runs: Path) -> list[str]:
    assert main(["report", *map(str, runs)]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def accuracy_title(page: Path) -> str:
    return page.read_text().partition('"title":"Held-out accuracy')[2].partition('"')[0]


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        ("aa", "Held-out accuracy 0.750 after sft/0 → 0.750 after grpo/0 (6 s)"),
        ("ab", "Held-out accuracy 0.750 after sft/0, 0.750 after grpo/0 (6 s)"),
        (["", "b"], "Held-out accuracy 0.750 after sft/0 → 0.750 after grpo/0 (6 s)"),
    ],
)
def test_stages_with_different_held_out_prompts_have_no_arrow(tmp_path, capsys, sets, line):
    sft = make_run(tmp_path / "sft" / "0", (0, sets[0]))
    grpo = make_run(tmp_path / "grpo" / "0", (0, sets[1]), started_from=sft)
    lines = reported(capsys, sft, grpo)
    assert line in lines
    note = (
        "The accuracies of sft/0 and those of grpo/0 were measured on different held-out prompts, "
        "or with other gold answers: do not compare them."
    )
    page = grpo / "report.html"
    is_mixed = sets == "ab"
    assert (note in lines) == (note in page.read_text()) == is_mixed
    assert accuracy_title(page) == (", different prompts" if is_mixed else "")


def test_what_an_accuracy_leaves_out_is_said(tmp_path, capsys):
    shares = {"val/unscored_fraction": [0.25, 0.0], "val/unscored_fraction@2": [0.1, 0.5]}
    metrics = {"val/accuracy": [0.5, 1.0], "val/avg@2": [0.5, 1.0]} | shares
    lines = reported(capsys, write_run(tmp_path / "my" / "0", metrics))
    said = [one for one in lines if "could not be scored" in one]
    for line, share, name in zip(said, ("25%", "50%"), shares, strict=True):
        of_all = "of the held-out completions could not be scored"
        assert line.startswith(f"my/0: up to {share} {of_all} ({name}).")


def test_sources_of_a_mixture_that_the_accuracy_leaves_out_are_named(tmp_path, capsys):
    shares = {"data/sums/share": [0.5], "data/words/share": [0.5]}
    metrics = shares | {"val/accuracy": [0.5], "val/sums/accuracy": [0.5]}
    lines = reported(capsys, write_run(tmp_path / "my" / "0", metrics))
    (said,) = (one for one in lines if "accuracy covers" in one)
    assert said.startswith("my/0: the held-out accuracy covers sums, and not words (no held")
    of_both = metrics | {"val/words/accuracy": [0.5]}
    assert not any("covers" in one for one in reported(capsys, write_run(tmp_path / "b", of_both)))


def test_compared_runs_are_grouped_by_their_held_out_prompts(tmp_path, capsys):
    sets = {"my/0": "a", "my/1": "b", "my/2": "a"}
    runs = [make_run(tmp_path / name, (0, one)) for name, one in sets.items()]
    note = "The accuracies of my/0 and my/2 and those of my/1 were measured on different held-out"
    assert any(line.startswith(note) for line in reported(capsys, *runs))
    assert accuracy_title(runs[-1] / "comparison-1.html") == ", different prompts"


def test_a_run_that_was_resumed_with_other_held_out_prompts_shows_its_last_accuracy(
    tmp_path, capsys
):
    run = make_run(tmp_path / "my" / "0", (0, "a"), (1, "b"))
    lines = reported(capsys, run)
    assert lines[1] == "my/0 3 3 s – 0.750 –"
    assert "Held-out accuracy 0.750 after my/0 (3 s)" in lines
    assert lines[4].startswith("my/0 was resumed with different held-out prompts")


def test_a_resumption_with_the_same_held_out_prompts_changes_nothing(tmp_path, capsys):
    run = make_run(tmp_path / "my" / "0", (0, "a"), (1, "a"))
    lines = reported(capsys, run)
    assert "Held-out accuracy 0.250 → 0.750 after my/0 (3 s)" in lines
    assert not any("different" in line for line in lines)


def test_an_accuracy_from_before_training_has_the_prompts_of_the_start(tmp_path):
    run = make_run(tmp_path / "my" / "0", (0, "a"), (2, "b"))
    (run / "metrics.csv").write_text(METRICS.replace("0.5", ""))
    assert held_out_hashes(*load_runs([run])) == ["a", "b"]


@pytest.mark.slow
def test_a_real_run_warns_once_of_held_out_prompts_that_it_trains_on(tmp_path, capsys):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    line = "3 of 4 held-out prompts are training prompts, too"
    with workplace(tmp_path):
        others = [*rows[5:], {"prompt": "?", "answer": "2"}]
        for name, few in {"train": rows, "other": others}.items():
            Path(f"{name}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in few))
        given = {"train": "train.jsonl", "validation": "other.jsonl", "prompts_per_step": 2}
        data = {"class_path": "PromptData", "init_args": given}
        Path("my.yaml").write_text(yaml.safe_dump(BASE | {"data": data}))
        words = ["fit", "--config=my.yaml", "--run_dir=my", "--trainer.max_steps=1"]
        assert main(words) == 0
        logged = Path("my/run.log").read_text()
        capsys.readouterr()
        shown = reported(capsys, Path("my"))
        page = Path("my/report.html").read_text()
    (event,) = [one for one in read_events(tmp_path / "my") if one.cause == "leaked_prompts"]
    assert (event.kind, event.step) == ("warning", 0)
    assert line in event.message
    assert logged.count(line) == 1
    assert [one.partition(line)[0].endswith("/my: ") for one in shown if line in one] == [True]
    assert line in page
    assert "leaked_prompts" in page


@pytest.mark.slow
def test_real_runs_record_their_held_out_prompts(tmp_path, capsys):
    evaluated = BASE["model"] | {"evaluation": {"before_training": True}}
    with workplace(tmp_path):
        Path("my.yaml").write_text(yaml.safe_dump(BASE | {"model": evaluated}))
        for name, size in {"a": 2, "b": 2, "c": 3}.items():
            words = ["--config=my.yaml", f"--run_dir={name}", "--trainer.max_steps=1"]
            assert main(["fit", *words, f"--data.validation_size={size}"]) == 0
        capsys.readouterr()
        same, mixed = reported(capsys, Path("a"), Path("b")), reported(capsys, Path("a"), Path("c"))
    assert not any("different held-out prompts" in line for line in same)
    assert any("different held-out prompts" in line for line in mixed)
