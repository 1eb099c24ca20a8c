"""Rows with scores are read from prepared data, a cache, a run or a file of completions."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from analyzed import measured, write_run
from cli_base import BASE

from lit_grpo.__main__ import main
from lit_grpo.cli.analyze.scored_rows import ScoredRow
from lit_grpo.cli.prepare.fingerprint import Scorer
from lit_grpo.cli.prepare.gold_cache import CheckedAnswers, JudgeVotes
from lit_grpo.cli.prepare.join_gold import Checked, vote_key
from lit_grpo.cli.prepare.recipe import Recipe, RecipeSource
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.judge import Judge
from lit_grpo.objective.advantages import has_signal
from lit_grpo.runs.files.completions import write_table


def test_a_cache_is_measured_by_question_and_by_vote(here, capsys):
    recipe = Recipe(
        description="",
        sources={"open": RecipeSource(kind="open", data="x")},
        judge=Judge(model="m", temperature=1.0),
    )
    scorer = Scorer.of(recipe)
    directory = scorer.directory(Path("gold"))
    scorer.write(directory)
    votes = JudgeVotes(directory)
    for prompt, grades in (("Why?", ((9, 9), (1, 3))), ("How?", ((5, 5), (5, 5)))):
        row = PreparedRow(
            origin="", id="", source="", kind="open", text_hash="", columns={"prompt": prompt}
        )
        for answer, of_answer in zip("ab", grades, strict=True):
            for number, grade in enumerate(of_answer):
                votes.add(vote_key(row, answer), number, grade, 0.0)
    votes.close()
    assert measured(capsys, "gold")["measures"]["all"]["num_null"] == 0
    votes = JudgeVotes(directory)
    votes.add("f" * 32, 0, 5, 0.0)
    votes.close()
    checked = CheckedAnswers(Path("gold"))
    checked.add("k", Checked(answers=("2", "3"), gold_scores=(1.0, 0.0)))
    checked.close()
    found = measured(capsys, "gold")
    assert found["kind"] == "cache"
    judged = found["measures"][directory.name]
    assert (judged["num_rows"], judged["num_null"], judged["signal_useful_pct"]) == (3, 1, 33.33)
    assert judged["vote_agreement"] == (3 * 1.0 + 0.5) / 4
    assert judged["vote_deviation"] == 0.025  # 0.1 of one answer in four
    assert judged["spread_histogram"][14] == 1  # 0.9 and 0.2
    assert found["measures"]["program"]["signal_useful_pct"] == 100.0
    assert found["measures"]["all"]["num_rows"] == 4
    (directory / "fingerprint.json").unlink()
    assert main(["analyze", "gold"]) == 2
    assert "fingerprint.json cannot be read" in capsys.readouterr().err


def test_the_groups_of_a_run_have_signal_if_their_rewards_differ_at_all(here, capsys):
    write_run([[(0.0, 0.01), (1.0, 1.0)], [(None, 1.0), (None, None)], [(0.0, 1.0)]])
    found = measured(capsys, "run")
    one = found["measures"]["all"]
    assert (found["kind"], found["threshold"]) == ("run", 0.0)
    assert (one["num_rows"], one["num_null"], one["signal_useful_pct"]) == (5, 2, 40.0)
    assert one["answer_lengths"]["max"] == 3
    assert one["num_duplicates"] is None
    strict = measured(capsys, "run", "--threshold", "0.1")
    assert strict["measures"]["all"]["signal_useful_pct"] == 20.0


@pytest.mark.parametrize("is_old", [False, True])
def test_groups_of_one_prompt_in_one_step_are_told_apart(here, capsys, is_old):
    """Older versions did not number the groups of a file, which all have one size."""
    rewards = [[(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)]]
    write_run(rewards, prompt_id="p", is_old=is_old)
    path = Path("run/completions/step_000000.parquet")
    rows = pq.read_table(path).to_pylist()
    for row in rows[4:]:
        row["prompt_id"] = "other"
    write_table(pa.Table.from_pylist(rows), path)
    one = measured(capsys, "run")["measures"]["all"]
    assert (one["num_rows"], one["signal_useful_pct"]) == (3, 33.33)


def test_a_damaged_file_of_a_run_is_named(here, capsys):
    write_run([[(0.0, 1.0)], [(1.0, 1.0)]])
    damaged = Path("run/completions/step_000001.parquet")
    damaged.write_bytes(b"")
    assert main(["analyze", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {damaged} cannot be read: ")
    assert line.endswith("Move it away to go on without it.")
    damaged.rename("elsewhere")
    assert measured(capsys, "run")["measures"]["all"]["num_rows"] == 1


def test_a_file_of_completions_has_the_groups_of_all_its_steps(here, capsys):
    write_run([[(0.0, 1.0)], [(1.0, 1.0)], [(0.0, 0.0), (None, 1.0)]])
    steps = [pq.read_table(path) for path in sorted(Path("run/completions").iterdir())]
    write_table(pa.concat_tables(steps), Path("rescored.parquet"))
    found = measured(capsys, "rescored.parquet")
    assert (found["kind"], found["threshold"]) == ("run", 0.0)
    one = found["measures"]["all"]
    assert (one["num_rows"], one["num_null"], one["signal_useful_pct"]) == (4, 1, 25.0)
    assert measured(capsys, "run")["measures"] == found["measures"]


def test_what_a_trial_of_rewards_has_written_is_measured(here, capsys):
    (here / "my.yaml").write_text(yaml.safe_dump(BASE))
    assert main(["rewards", "--config=my.yaml", "--n=3", "--run_dir=tried"]) == 0
    capsys.readouterr()
    assert measured(capsys, "tried/rewards.parquet")["measures"]["all"]["num_rows"] == 3
    assert main(["analyze", "tried"]) == 2
    said = capsys.readouterr().err
    assert "got one with tried/rewards.parquet. Name one that" in said
    assert said.endswith(", or that file.\n")


def test_a_file_of_other_rows_is_told_what_gives_them_scores(here, capsys):
    write_table(pa.table({"prompt": ["a"], "answer": ["b"]}), Path("rows.parquet"))
    assert main(["analyze", "rows.parquet"]) == 2
    said = capsys.readouterr().err
    assert "got a file without num_tokens, prompt_id, reward, valid. Rows of other files" in said


@pytest.mark.parametrize(
    ("scores", "spread"),
    [((0.0, 0.5, 1.0), 1.0), ((1000.0, 1000.0001), 0.0), ((0.0, 1e-8), 1e-8), (None, None)],
)
def test_scores_that_differ_by_rounding_have_no_spread(scores, spread):
    assert ScoredRow(source="a", scores=scores).spread == spread


@pytest.mark.parametrize("difference", [4e-7, 5e-7, 7e-7, 1e-5])
def test_scores_have_a_spread_if_their_group_has_a_signal(difference):
    scores = (1.0, 1.0 + difference)
    group = torch.tensor([scores], dtype=torch.double)
    expected = bool(has_signal(group, torch.ones(1, 2, dtype=torch.bool)))
    assert bool(ScoredRow(source="a", scores=scores).spread) is expected
    assert expected is (difference > 6e-7)
