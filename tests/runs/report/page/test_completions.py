from __future__ import annotations

import pytest
from logged_runs import write_run

from lit_grpo.runs.report.history import load_runs
from lit_grpo.runs.report.page import completions as page_completions
from lit_grpo.runs.report.page.completions import (
    MAX_CHARACTERS,
    MAX_ROWS,
    MAX_STEPS,
    choose_groups,
    choose_steps,
    sample_completions,
    shorten,
)


def sample(*runs, num_steps=None):
    return sample_completions(load_runs(runs, num_steps))


def test_a_row_has_its_texts_scores_and_place(tmp_path):
    rows = [{}, {"completion": "3", "reward": 0.0, "score/math": 0.0}]
    run = write_run(tmp_path / "run", {"reward/mean": [0.5]}, completions={0: rows})
    found = sample(run)
    assert found.prompts == ["1+1="]
    assert found.rewards == ["math"]
    assert found.notes == ["2 of the 2 completions of 1 of 1 steps are shown."]
    first, second = found.rows
    assert (first["run"], first["step"], first["file"]) == (0, 1, "step_000000.parquet")
    assert (second["prompt"], second["completion"], second["scores"]) == (0, "3", {"math": 0.0})


def test_a_score_without_a_value_says_why(tmp_path):
    failed = {"score/math": None, "outcome/math": "timeout", "detail/math": "after 2 s"}
    rows = [failed | {"reward": None, "valid": False}, {"detail/math": "equal"}]
    run = write_run(tmp_path / "run", {"reward/mean": [0.5]}, completions={0: rows})
    first, second = sample(run).rows
    assert (first["reward"], first["scores"]) == (None, {"math": None})
    assert first["details"] == {"math": "timeout after 2 s"}
    assert second["details"] == {"math": "equal"}


def test_many_rows_are_bounded_and_the_page_says_so(tmp_path):
    rows = [{"prompt_id": f"p{n // 4}", "prompt": f"{n // 4}+1="} for n in range(100)]
    completions = dict.fromkeys(range(60), rows)
    run = write_run(tmp_path / "run", {"reward/mean": [0.5] * 60}, completions=completions)
    found = sample(run)
    assert len(found.rows) <= MAX_ROWS
    assert len({one["step"] for one in found.rows}) == MAX_STEPS
    assert found.notes == [
        f"{len(found.rows):,} of the 2,000 completions of {MAX_STEPS} of 60 steps are shown."
    ]


def test_files_of_all_ranks_are_read_and_files_after_the_last_step_are_not(tmp_path):
    run = write_run(tmp_path / "run", {"reward/mean": [0.5] * 3}, completions={1: [{}], 3: [{}]})
    directory = run / "completions"
    for rank in (0, 1):
        source = directory / "step_000001.parquet"
        (directory / f"step_000002_rank{rank}.parquet").write_bytes(source.read_bytes())
    assert [one["step"] for one in sample(run).rows] == [3, 3, 2]
    assert [one["step"] for one in sample(run, num_steps=2).rows] == [2]


def test_a_damaged_file_is_left_out_and_counted(tmp_path):
    run = write_run(tmp_path / "run", {"reward/mean": [0.5] * 2}, completions={0: [{}]})
    (run / "completions" / "step_000001.parquet").write_bytes(b"PAR1 and no more")
    found = sample(run)
    assert len(found.rows) == 1
    assert found.notes[0].endswith("are shown. 1 file cannot be read.")


def test_runs_share_the_page(tmp_path):
    rows = [{"prompt_id": f"p{n}", "prompt": f"{n}+1="} for n in range(MAX_ROWS)]
    metrics = {"reward/mean": [0.5]}
    runs = [write_run(tmp_path / name / "0", metrics, completions={0: rows}) for name in "ab"]
    found = sample(*runs, write_run(tmp_path / "c" / "0", metrics))
    assert [len([one for one in found.rows if one["run"] == number]) for number in range(3)] == [
        MAX_ROWS // 2,
        MAX_ROWS // 2,
        0,
    ]
    assert found.notes[0].startswith("a/0: ")


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [(3, [0, 1, 2]), (20, list(range(20)))],
)
def test_few_steps_are_all_shown(num_steps, expected):
    assert choose_steps(range(num_steps)) == expected


def test_many_steps_are_the_newest_and_an_even_spread():
    chosen = choose_steps(range(0, 1000))
    assert chosen[-5:] == [995, 996, 997, 998, 999]
    assert (len(chosen), chosen[0], chosen[14]) == (20, 0, 994)
    distances = [later - earlier for earlier, later in zip(chosen[:14], chosen[1:15], strict=True)]
    assert set(distances) == {71}


def test_groups_stay_whole():
    rows = [{"group": n // 3} for n in range(30)]
    chosen = [row["group"] for row in choose_groups(rows, 10)]
    assert chosen == [0, 0, 0, 4, 4, 4, 9, 9, 9]
    assert len(choose_groups(rows, 1)) == 3
    assert choose_groups([], 5) == []


def test_groups_with_the_same_prompt_are_not_one(tmp_path, monkeypatch):
    monkeypatch.setattr(page_completions, "MAX_ROWS", 4)
    rows = [{"group": n // 2, "completion": str(n)} for n in range(8)]
    run = write_run(tmp_path / "run", {"reward/mean": [0.5]}, completions={0: rows})
    found = sample(run)
    assert {row["prompt_id"] for row in found.rows} == {"p0"}
    assert [row["completion"] for row in found.rows] == ["0", "1", "6", "7"]


def test_groups_of_two_ranks_with_the_same_number_are_not_one(tmp_path):
    rows = [{"group": 0, "completion": str(n)} for n in range(2)]
    run = write_run(tmp_path / "run", {"reward/mean": [0.5]}, completions={0: rows})
    first = run / "completions" / "step_000000.parquet"
    first.with_name("step_000000_rank1.parquet").write_bytes(first.read_bytes())
    read, _ = page_completions._read(sorted(first.parent.iterdir()))
    assert len(choose_groups(read, 1)) == 2


def test_of_a_long_text_the_start_and_the_end_are_kept():
    text = "a" * MAX_CHARACTERS + "b" * MAX_CHARACTERS
    shown = shorten(text, MAX_CHARACTERS)
    assert shown.startswith("a" * 666 + "\n[… 2,000 characters left out …]\n")
    assert shown.endswith("b" * 1334)
    assert shorten("short", 10) == "short"
