"""Options of the commands without a config: spelled as people do, and refused in one line."""

import pytest

from lit_grpo.cli.file_options import parse_options, parse_run, parse_runs
from lit_grpo.types import UserError


@pytest.mark.parametrize("option", ["--before_step", "--before-step"])
def test_an_option_may_be_written_with_dashes(option):
    for words in ([option, "12"], [f"{option}=12"]):
        given = parse_run("checkpoints", ["runs/my-run/0", *words, "--export=a-b"])
        assert (given.run_dir, given.before_step) == ("runs/my-run/0", 12)
        assert given.export == "a-b"


@pytest.mark.parametrize("option", ["--out", "--cache", "--holdout"])
def test_none_is_no_path_of_an_option(option):
    with pytest.raises(UserError, match=f"^{option}: None is not a path. Leave it out, or"):
        parse_options("prepare", [f"{option}=None"])


def test_options_may_stand_between_several_runs():
    given = parse_runs("report", ["runs/a-b", "--steps", "3", "runs/c"])
    assert (given.run_dirs, given.steps) == (["runs/a-b", "runs/c"], 3)


def test_a_command_that_takes_options_only_refuses_anything_else():
    assert parse_options("prepare", ["--list"]).list
    with pytest.raises(ValueError, match=r"unrecognized arguments: rows\.jsonl\. See lit-grpo pre"):
        parse_options("prepare", ["--list", "rows.jsonl"])


def test_paths_of_options_may_begin_with_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = parse_options("prepare", ["--preset=~/my.yaml", "--out", "~/out", "--cache=~/gold"])
    assert (given.preset, given.out) == ("/home/me/my.yaml", "/home/me/out")
    assert given.cache == "/home/me/gold"
    assert parse_runs("report", ["~/a", "b", "--steps=3", "~/c"]).run_dirs == [
        "/home/me/a",
        "b",
        "/home/me/c",
    ]
    given = parse_run("analyze", ["~/prepared", "--split", "~/train", "--picture=~/a.png"])
    assert (given.run_dir, given.picture) == ("/home/me/prepared", "/home/me/a.png")
    assert given.split == "~/train"  # no path
