"""The completions of every step as parquet."""

import pandas as pd
from toy_rollouts import completion, failed, fit, outputs, rollouts, train_batch

from lit_grpo.runs.files.completions import CompletionsFile, free_path, read_completions
from lit_grpo.types import Outcome


def test_completions_are_written_with_scores_and_advantages(tmp_path):
    down = failed(Outcome.TIMEOUT, "30 s are over", seconds=30.0)
    completions = [completion("7"), completion("it is", "length"), completion("no")]
    batch = rollouts([[1.0, 0.0, down]], completions)
    trained = train_batch([0.5, -0.5, 0.0], trained=[True, True, False])
    fit(lambda step: outputs(batch, trained), [CompletionsFile(tmp_path)], steps=1)
    frame = pd.read_parquet(tmp_path / "completions" / "step_000000.parquet")
    assert frame["step"].tolist() == [0, 0, 0]
    assert frame["prompt_id"].tolist() == ["p0"] * 3
    assert frame["prompt"].tolist() == ["1+1="] * 3
    assert frame["completion"].tolist() == ["7", "it is", "no"]
    assert frame["finish_reason"].tolist() == ["stop", "length", "stop"]
    assert frame["num_tokens"].tolist() == [1, 5, 2]
    assert [list(ids) for ids in frame["token_ids"]] == [[55], [*b"it is"], [*b"no"]]
    assert frame["answer"].tolist() == ["2"] * 3
    assert frame["reward"].tolist()[:2] == [1.0, 0.0]
    assert frame["valid"].tolist() == [True, True, False]
    assert frame["advantage"].tolist()[:2] == [0.5, -0.5]
    assert frame["score/math"].tolist()[:2] == [1.0, 0.0]
    assert frame[["reward", "advantage", "score/math"]].iloc[2].isna().all()
    assert frame["outcome/math"].tolist() == ["ok", "ok", "timeout"]
    assert frame["detail/math"].tolist() == ["", "", "30 s are over"]
    assert frame["seconds/math"].tolist() == [0.25, 0.25, 30.0]
    assert frame["cost/math"].tolist() == [0.0, 0.0, 0.0]


def test_completions_are_written_every_step_also_without_a_train_batch(tmp_path):
    unscored = outputs(rollouts([[None, None]]))
    fit(lambda step: unscored, [CompletionsFile(tmp_path)], steps=2)
    paths = sorted((tmp_path / "completions").iterdir())
    assert [path.name for path in paths] == ["step_000000.parquet", "step_000001.parquet"]
    assert pd.read_parquet(paths[1])["advantage"].isna().all()


def test_files_of_steps_that_are_taken_again_are_removed(tmp_path):
    old = tmp_path / "completions" / "step_000007_rank1.parquet"
    old.parent.mkdir()
    old.touch()
    unscored = outputs(rollouts([[None, None]]))
    fit(lambda step: unscored, [CompletionsFile(tmp_path)], steps=1)
    assert [path.name for path in old.parent.iterdir()] == ["step_000000.parquet"]


def test_the_columns_that_are_asked_for_are_read_or_all(tmp_path):
    path = tmp_path / "step_000000.parquet"
    pd.DataFrame({"a": [1], "b": [2]}).to_parquet(path)
    asked = (None, ["b", "c"], [])
    assert [read_completions(path, one).column_names for one in asked] == [["a", "b"], ["b"], []]


def test_a_path_that_exists_is_numbered(tmp_path):
    assert free_path(tmp_path / "a.parquet") == tmp_path / "a.parquet"
    for name in ("a.parquet", "a-1.parquet", "a-3.parquet"):
        (tmp_path / name).touch()
    assert free_path(tmp_path / "a.parquet") == tmp_path / "a-2.parquet"
