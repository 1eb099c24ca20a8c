"""The script that kills a server: its checks fail when they should, and it kills what it names."""

import importlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest
from engine_runs import warmed_up
from paths import SUPPORT
from served_engines import PROGRAM, QUICK
from sglang_server import OFFLINE
from tiny import tiny_policy
from vllm_environment import HAS_VLLM, VLLM_PROGRAM, needs_vllm
from worker_processes import is_alive, wait_until

from lit_grpo.rollout.server.process import ServerProcess

script, checks = (importlib.import_module(name) for name in ("failing_engine", "_checks"))

NAN = float("nan")
NUM_STEPS = 4
KILLS = {1: "main process", 2: "worker"}


def undisturbed(kills=None, **changes):
    """The output of a good run of four steps, with some of its metrics changed."""
    kills, steps = kills or {}, range(NUM_STEPS)
    metrics = {
        "step": steps,
        "rollout/restarts": [float(step in kills) for step in steps],
        "rollout/failed_fraction": 0.0,
        "sampler/weight_check_difference": [1e-6 if step in {0, *kills} else NAN for step in steps],
        "sampler/logprob_difference_max": 2e-5,
        "val/accuracy": [0.5, NAN, NAN, 0.75],
    }
    completions = {
        "step": [0, 0, 1, 1],
        "prompt_id": ["a", "b", "c", "d"],
        "token_ids": [[1, 2], [3], [4, 5], [6]],
    }
    return script.RunOutput(
        metrics=pd.DataFrame(metrics | changes),
        completions=pd.DataFrame(completions),
        exit_code=0,
        killed=tuple(kills.values()),
    )


def killed(**changes):
    return undisturbed(KILLS, **changes)


def with_metric(name, values):
    """Two good runs, except for one metric of the killed one."""
    return undisturbed(), killed(**{name: values})


def without_its_last_step(run):
    return replace(run, metrics=run.metrics.iloc[:-1].assign(**{"val/accuracy": 0.75}))


def compare(run, other):
    return script.compare_runs(run, other, NUM_STEPS)


def failed_checks(run, other):
    return checks.failed_checks(compare(run, other))


def test_all_checks_pass_when_the_kills_cost_nothing():
    assert failed_checks(undisturbed(), killed()) == set()


FAILING_RUNS = {
    "both runs made all their steps": {
        "the killed run fails": (undisturbed(), replace(killed(), exit_code=5)),
        "the other run fails": (replace(undisturbed(), exit_code=1), killed()),
        "both fail": (replace(undisturbed(), exit_code=1), replace(killed(), exit_code=1)),
        "the killed run is short": (undisturbed(), without_its_last_step(killed())),
        "the other run is short": (without_its_last_step(undisturbed()), killed()),
    },
    "every kill was followed by one restart": {
        "one restart is missing": with_metric("rollout/restarts", [0, 1, 0, 0]),
        "one kill has two restarts": with_metric("rollout/restarts", [0, 1, 2, 0]),
        "nothing was killed": (undisturbed(), undisturbed()),
        "restarts are unknown": with_metric("rollout/restarts", NAN),
    },
    "no row was lost": {
        "one row is": with_metric("rollout/failed_fraction", [0, 0, 1 / 1024, 0]),
        "lost rows are unknown": with_metric("rollout/failed_fraction", NAN),
    },
    "the weights were checked after every restart": {
        "one check is missing": with_metric(
            "sampler/weight_check_difference", [1e-6, 1e-6, NAN, NAN]
        ),
    },
    "no completion was sampled from other weights": {
        "one was": with_metric("sampler/logprob_difference_max", [0, 0, 0.01, 0]),
        "differences are unknown": with_metric("sampler/logprob_difference_max", NAN),
    },
    "the accuracy is that of the undisturbed run": {
        "it is lower": with_metric("val/accuracy", [0.5, NAN, NAN, 0.71]),
        "it is higher": with_metric("val/accuracy", [0.5, NAN, NAN, 0.79]),
        "only an earlier one is equal": with_metric("val/accuracy", [0.75, NAN, NAN, NAN]),
    },
}
"""Check -> case -> two runs with which it must fail."""


def test_every_check_has_runs_with_which_it_fails():
    assert FAILING_RUNS.keys() == compare(undisturbed(), killed()).keys()


@pytest.mark.parametrize(
    ("check", "case"), [(check, case) for check, cases in FAILING_RUNS.items() for case in cases]
)
def test_a_check_fails_with_runs_that_do_not_pass_it(check, case):
    assert failed_checks(*FAILING_RUNS[check][case]) == {check}


def test_an_accuracy_within_the_noise_counts_as_equal():
    assert failed_checks(*with_metric("val/accuracy", [0.5, NAN, NAN, 0.73])) == set()


def test_equal_completions_are_counted():
    other = killed()
    statement = "the accuracy is that of the undisturbed run"
    assert "; 100.0% of completions are equal" in compare(undisturbed(), other)[statement][1]
    other.completions.at[2, "token_ids"] = [4, 6]
    assert "; 75.0% of completions are equal" in compare(undisturbed(), other)[statement][1]
    fewer = replace(other, completions=other.completions.iloc[1:])
    assert "; 0.0% of completions are equal" in compare(undisturbed(), fewer)[statement][1]


def test_the_exit_code_is_0_if_all_checks_pass(capsys):
    assert checks.print_checks(compare(undisturbed(), killed())) == 0
    assert "no row was lost" in capsys.readouterr().out
    lost = killed(**{"rollout/failed_fraction": [0, 0, 0.5, 0]})
    assert checks.print_checks(compare(undisturbed(), lost)) == 1
    assert "largest failed fraction 0.5" in capsys.readouterr().out


SERVER = """
(exec -a VLLM::EngineCore sleep 600) &
(exec -a VLLM::Worker sleep 600) &
wait
"""
TITLES = {"VLLM::EngineCore", "VLLM::Worker"}


@pytest.fixture
def trainer(tmp_path):
    """This process as the trainer, with a server under a guard that has vLLM's process titles."""
    program = tmp_path / "server.sh"
    program.write_text(SERVER)
    server = ServerProcess(["bash", str(program)], {}, tmp_path / "server.log")
    children = psutil.Process(server.pid).children
    try:
        wait_until(lambda: {word for one in children() for word in script.words(one)} >= TITLES)
        yield SimpleNamespace(pid=os.getpid(), poll=lambda: None)
    finally:
        server.stop()


def test_each_process_of_a_server_is_found(trainer, tmp_path):
    victims = ("main process", "engine core", "worker")
    main, core, worker = (script.find_process(trainer.pid, victim) for victim in victims)
    assert main.cmdline() == ["bash", str(tmp_path / "server.sh")]
    assert core.cmdline()[0] == "VLLM::EngineCore"
    assert worker.cmdline()[0] == "VLLM::Worker"


def test_a_kill_waits_for_its_row(trainer, tmp_path):
    metrics, victims = tmp_path / "metrics.csv", []
    core, worker = (script.find_process(trainer.pid, victim) for victim in script.TITLES)
    kills = {2: "worker", 1: "engine core"}

    def kill():
        victims.extend(script.kill_at_rows(trainer, metrics, kills))

    metrics.write_text("step\n0\n")
    killing = threading.Thread(target=kill)
    killing.start()
    wait_until(lambda: not is_alive(core.pid))
    assert is_alive(worker.pid)
    metrics.write_text("step\n0\n1\n")
    wait_until(lambda: not is_alive(worker.pid))
    killing.join(60)
    assert victims == ["engine core", "worker"]


def test_nothing_is_killed_when_the_trainer_has_ended(tmp_path):
    trainer = subprocess.Popen(["true"])
    trainer.wait()
    assert script.kill_at_rows(trainer, tmp_path / "metrics.csv", KILLS) == []


def test_kills_are_spread_over_the_run_at_different_steps():
    assert script.planned_kills(30) == {8: "main process", 15: "engine core", 22: "worker"}
    for num_steps in range(script.MIN_STEPS, 50):
        first, second, third = script.planned_kills(num_steps)
        assert 0 < first < second < third < num_steps


def test_too_few_steps_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["failing_engine.py", "--steps", "4"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "--steps must be >= 5, got 4" in capsys.readouterr().err


@pytest.mark.skipif(HAS_VLLM, reason="the command runs with a real vLLM")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_small_runs_with_and_without_a_kill_pass_all_checks(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))  # the reward is there
    model = tmp_path / "model"
    tiny_policy().save_pretrained(model)
    small, held = tmp_path / "small.yaml", tmp_path / "held.yaml"
    small.write_text(json.dumps(SMALL))
    held.write_text(json.dumps(HELD))
    run, other = (
        script.train(tmp_path / str(len(kills)), model, NUM_SMALL_STEPS, kills, options)
        for kills, options in (
            ({}, ["--config", str(small)]),
            ({2: "main process"}, ["--config", str(small), "--config", str(held)]),
        )
    )
    assert checks.failed_checks(script.compare_runs(run, other, NUM_SMALL_STEPS)) == set()
    assert other.killed == ("main process",)
    wait_until(lambda: processes_of(tmp_path) == [])


def processes_of(run_dir):
    """Return the processes with a path in this directory on their command line."""
    return [one for one in psutil.process_iter() if str(run_dir) in " ".join(script.words(one))]


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_command_passes_with_a_real_vllm_and_three_kills(
    tmp_path, tmp_path_factory, importer, monkeypatch
):
    """The undisturbed run is a new interpreter, the other is forked."""
    start = subprocess.Popen

    def start_run(command: list[str], cwd: Path) -> Any:
        if str(tmp_path / "undisturbed") in command:
            return start(command, cwd=cwd)
        return importer.start(command[3:], cwd, tmp_path / "said.txt")

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(Popen=start_run))
    # Fewer steps and prompts than the quickstart's: what is shown here needs no more.
    policy, num_steps = warmed_up(tmp_path_factory), 9
    program = f"--model.engine.init_args.launch.program={json.dumps(VLLM_PROGRAM)}"
    options = [program, "--data.prompts_per_step=64"]
    run = ["--steps", str(num_steps), "--policy", str(policy), "--dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["failing_engine.py", *run, "--", *options])
    assert script.main() == 0, (tmp_path / "said.txt").read_text()
    restarts = pd.read_csv(tmp_path / "killed" / "metrics.csv")["rollout/restarts"]
    assert len(restarts) == 1 + num_steps  # one before training
    assert restarts.sum() == len(script.planned_kills(num_steps)) == 3
    assert processes_of(tmp_path) == []


NUM_SMALL_STEPS = 5
SMALL = {
    "model": {
        "rewards": [{"class_path": "small_runs.ShareOfLowBytes"}],
        "engine": {
            "class_path": "SGLangEngine",
            "init_args": {
                "launch": {
                    "program": PROGRAM, "python": None, "max_model_len": None, "flags": None,
                    "env": OFFLINE,
                },
                "supervision": QUICK,
            },
        },
    },
    "data": {
        "class_path": "AdditionData",
        "init_args": {"prompts_per_step": 4, "validation_size": 8, "validation_batch_size": 8},
    },
}  # fmt: skip
"""Overrides of the quickstart: a few sums, and the tests' own server."""
HELD = {"trainer": {"callbacks+": [{"class_path": "holds.HoldServer", "init_args": {"step": 2}}]}}
"""Further ones, with which the kill at row 2 never comes too late."""


def test_help_describes_the_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["failing_engine.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        script.main()
    assert "killed three times" in " ".join(capsys.readouterr().out.split())
