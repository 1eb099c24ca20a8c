"""What a directory holds out stays held out when it is prepared again."""

import json

import datasets
import huggingface_hub
import pytest

from lit_grpo.__main__ import main
from lit_grpo.data.rows.prepared import find_prepared


def write_sums(count, name="sums.jsonl"):
    with open(name, "w") as file:
        for n in range(count):
            print(
                json.dumps({"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}"}),
                file=file,
            )


def prepare(*arguments):
    data = ("--preset", "verifiable_only", "--data", "verifiable=sums.jsonl")
    return main(["prepare", *data, "--out", "out", *arguments])


def held_out():
    return set(find_prepared("out").holdout().ids)


def trained():
    return {row.id for row in find_prepared("out").split("train").rows()}


@pytest.fixture
def eight(here):
    """The ids of eight of 30 rows, which the directory ``out`` holds out."""
    write_sums(30)
    assert prepare("--holdout_size", "8") == 0
    return held_out()


def files(here):
    return {path.name: path.read_bytes() for path in (here / "out").iterdir()}


def test_a_smaller_holdout_in_place_of_a_larger_one_is_refused(eight, here, capsys):
    before = files(here)
    for flags in (["--holdout_size", "4"], ["--holdout_size", "8", "--seed", "3"]):
        assert prepare(*flags) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: out holds out rows that would be trained on or validate, ")
        assert "Keep them with --holdout out/holdout_ids.json instead of --holdout_size" in said
        assert files(here) == before


def test_a_larger_holdout_has_the_smaller_one_in_it(eight):
    assert prepare("--holdout_size", "12") == 0
    assert eight < held_out()


def test_rows_that_are_added_do_not_set_others_free(eight, capsys):
    write_sums(300)
    assert prepare("--holdout_size", "8") == 2
    assert "out holds out rows that would be trained on" in capsys.readouterr().err
    assert prepare("--holdout", "out/holdout_ids.json") == 0
    assert held_out() == eight
    assert len(trained()) + len(find_prepared("out").split("validation").rows()) == 292


def test_a_holdout_is_given_up_by_a_flag(eight):
    assert prepare("--holdout_size", "4", "--release_holdout") == 0
    assert held_out() < eight
    assert eight & trained()


def test_a_holdout_that_cannot_be_read_is_given_up_by_the_same_flag(eight, here, capsys):
    (here / "out/holdout_ids.json").write_text("{")
    assert prepare("--holdout_size", "8") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: out holds out rows, but which is not known: out/holdout_ids")
    assert "with --release_holdout" in said
    assert prepare("--holdout_size", "8", "--release_holdout") == 0
    assert held_out() == eight


def test_a_holdout_of_more_prompts_than_there_are_is_counted_as_they_are(here, capsys):
    write_sums(26)
    assert prepare("--holdout_size", "400") == 2
    assert "of 26 prompts 26 are held out and 0 validate. Set" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["precompute"], ["prepare", "--out", "out"]])
def test_without_a_preset_the_hub_that_is_out_of_reach_is_named_with_the_way_out(
    command, here, capsys, monkeypatch
):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(command) == 2
    reading, said = capsys.readouterr().err.splitlines()
    assert reading == "reading openbmb/UltraFeedback:train[:8000], source 'open' of open_only"
    assert said.startswith("error: the source 'open' of open_only cannot be read: openbmb/Ultra")
    assert said.endswith("set --data open=FILE, or --preset to a recipe of yours.")
