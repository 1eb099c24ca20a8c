"""``lit-grpo doctor`` as a user runs it: configs that can start, and one that each check fails."""

from __future__ import annotations

import json
import re
import shutil
from collections import namedtuple

import pytest
import yaml
from cli_base import BASE
from doctor_runs import doctor, judged
from terminal import shown_in_terminal
from tiny import LLAMA

from lit_grpo.__main__ import main
from lit_grpo.cli.commands import BUNDLED
from lit_grpo.cli.doctor import command
from lit_grpo.cli.doctor.command import summary
from lit_grpo.cli.doctor.findings import State

HUGE = {**LLAMA, "hidden_size": 2**15, "intermediate_size": 2**17, "num_hidden_layers": 100}


def test_a_run_that_can_start_is_0_and_says_what_it_will_do(here, capsys):
    exit_code, shown = doctor(capsys, "--trainer.max_steps=8")
    assert exit_code == 0
    assert shown["summary"].strip().startswith("Ready to start")
    assert "2 prompts x 2 completions (model.group_size) = 4 completions" in shown["batch"]
    assert "1 optimizer step per rollout step, each from at most 1 micro-batch" in shown["batch"]
    assert "An epoch of 8 prompts has 4 rollout steps; the run has 8 (2 epochs)." in shown["batch"]
    _, others = doctor(capsys, "--trainer.max_steps=8", "--data.prompts_per_step=3")
    left_out = "An epoch of 8 prompts has 2 rollout steps, which leave out 2 (others in each); the"
    assert left_out in others["batch"]
    assert "8 training prompts, 2 held-out prompts" in shown["data"]
    assert "correct can score every training prompt" in shown["data"] or "math" in shown["data"]
    assert {"versions", "model", "memory", "disk", "engine", "credentials"} <= shown.keys()
    assert [path.name for path in here.iterdir()] == ["base.yaml"]


def test_a_wrong_config_is_the_same_line_as_for_fit(capsys):
    lines = []
    for name in ("fit", "doctor"):
        assert main([name, "--config=base.yaml", "--model.group_sise=4"]) == 2
        lines.append(capsys.readouterr().err)
    assert lines[0] == lines[1]
    assert lines[0].startswith("error: model.group_sise")


def test_rewards_that_are_missing_are_named_as_by_fit(here, capsys):
    model = {key: value for key, value in BASE["model"].items() if key != "rewards"}
    (here / "base.yaml").write_text(yaml.safe_dump(BASE | {"model": model}))
    for name in ("fit", "doctor"):
        assert main([name, "--config=base.yaml"]) == 2
        assert "error: model.rewards: required, but not set" in capsys.readouterr().err
    (here / "base.yaml").write_text(yaml.safe_dump(BASE | {"model": {"policy": model["policy"]}}))
    words = ["--model.rewards=[MathReward]", "--model.sampling.max_tokens=3"]
    assert main(["doctor", "--config=base.yaml", *words]) == 0
    assert "2 prompts x 8 completions" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_failed_and_names_settings(capsys):
    exit_code, shown = doctor(capsys, f"--model.policy.architecture={json.dumps(HUGE)}")
    assert exit_code == 1
    assert shown["memory"].strip().startswith("failed memory Needs at most about")
    assert (
        "To save memory, train an adapter instead of all weights (model.policy.lora"
        in (shown["memory"])
    )
    assert "Do not start yet:" in shown["summary"]


def test_a_disk_that_is_too_small_is_failed(monkeypatch, capsys):
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    exit_code, shown = doctor(capsys)
    assert exit_code == 1
    assert "where 0.000977 KiB are free" in shown["disk"]
    assert "Set run_dir to a directory with more space" in shown["disk"]


def test_checkpoints_that_cannot_be_written_are_failed(here, capsys):
    (here / "afile").touch()
    arguments = ["--trainer.callbacks+=Checkpoints", "--trainer.callbacks.dirpath=afile"]
    exit_code, shown = doctor(capsys, *arguments)
    assert exit_code == 1
    assert "dirpath must be a place that can be written, got afile" in shown["disk"]


def test_a_cache_of_a_judge_that_cannot_be_written_is_failed(here, capsys):
    (here / "afile").touch()
    arguments = judged("http://127.0.0.1:1/v1", cache="afile"), "--offline"
    exit_code, shown = doctor(capsys, *arguments)
    assert exit_code == 1
    assert "judge.cache must be a place that can be written, got afile" in shown["disk"]


def test_an_exception_in_a_check_is_a_failed_check_and_the_others_go_on(monkeypatch, capsys):
    def broken(subject):
        return {}["nothing"]

    monkeypatch.setitem(command.CHECKS, "batch", (broken,))
    exit_code, shown = doctor(capsys)
    assert exit_code == 1
    assert "failed batch unexpectedly raised KeyError: 'nothing' (" in shown["batch"]
    assert re.search(r"test_command.py, line \d+\). Fix that line", shown["batch"])
    assert "Needs at most" in shown["memory"]


@pytest.mark.slow
def test_a_missing_login_of_wandb_is_failed_and_offline_is_a_remark(here, importer):
    words = ["doctor", "--config=base.yaml", "--trainer.logger=WandbLogger"]
    alone = {"WANDB_API_KEY": "", "NETRC": "nowhere", "HOME": str(here)}
    found = {}
    for mode in ("online", "offline"):
        with importer.running(words, here, **alone, WANDB_MODE=mode) as started:
            found[mode] = started.wait()[0], (here / "said.txt").read_text()
    assert found["online"][0] == 1
    assert "wandb needs a login, and there is none. Run `wandb login`" in found["online"][1]
    assert found["offline"][0] == 0
    assert "wandb is offline" in found["offline"][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["debug", "quickstart", "quickstart_sft", "gsm8k", "rubric_8b"])
def test_every_bundled_experiment_can_be_checked(name, capsys):
    assert (BUNDLED / f"{name}.yaml").is_file()
    exit_code, shown = doctor(capsys, "--offline", config=name)
    assert exit_code in (0, 1)
    assert not any("unexpectedly raised" in text for text in shown.values())


@pytest.mark.slow
def test_in_a_terminal_the_list_is_as_wide_as_the_terminal(here, importer):
    lines = shown_in_terminal(importer, "doctor", "--config=base.yaml", cwd=here, columns=80)
    assert any(re.match(r"ok +batch +2 prompts x 2 completions", line) for line in lines)
    assert max(len(line.rstrip()) for line in lines) <= 80


def test_the_summary_names_what_failed_or_what_is_remarked_on():
    found = {"data": {State.OK, State.REMARK}, "disk": {State.OK}}
    assert summary(found) == "Ready to start, with remarks on data."
    assert summary(found | {"disk": {State.FAILED}}) == "Do not start yet: disk failed."


@pytest.mark.parametrize("run_dir", ["afile", "afile/run", "dangling"])
def test_a_run_dir_that_is_a_file_is_refused_with_the_sentence_of_fit(run_dir, here, capsys):
    (here / "afile").touch()
    (here / "dangling").symlink_to(here / "nowhere")
    assert main(["fit", "--config=base.yaml", f"--run_dir={run_dir}"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1].removeprefix("error: ")
    assert line.startswith("run_dir must be a directory that can be written, got ")
    exit_code, shown = doctor(capsys, f"--run_dir={run_dir}")
    assert exit_code == 1
    assert line in shown["disk"]
    assert "disk failed" in shown["summary"]
