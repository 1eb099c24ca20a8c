"""The run beside a server that is killed, and that its findings would notice what they deny."""

import importlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
from engine_runs import run_to_its_end
from paths import ROOT, SUPPORT
from served_engines import PROGRAM, QUICK
from sglang_server import OFFLINE
from tiny import tiny_policy
from vllm_environment import PYTHON, needs_vllm
from worker_processes import is_alive, wait_until

from lit_grpo.rollout.server.process import ServerProcess

script, shared = (importlib.import_module(name) for name in ("failing_engine", "_findings"))

COMMAND = [sys.executable, str(ROOT / "scripts" / "failing_engine.py")]
NAN = float("nan")
NUM_STEPS = 4
DEATHS = {1: "main process", 2: "worker"}


def evidence(deaths=None, **changes):
    """Of a run of four steps that went well, but for changes of its metrics."""
    deaths, steps = deaths or {}, range(NUM_STEPS)
    metrics = {
        "step": steps,
        "rollout/restarts": [float(step in deaths) for step in steps],
        "rollout/failed_fraction": 0.0,
        "sampler/proof_difference": [1e-6 if step in {0, *deaths} else NAN for step in steps],
        "sampler/logprob_difference_max": 2e-5,
        "val/accuracy": [0.5, NAN, NAN, 0.75],
    }
    completions = {
        "step": [0, 0, 1, 1],
        "prompt_id": ["a", "b", "c", "d"],
        "token_ids": [[1, 2], [3], [4, 5], [6]],
    }
    return script.Evidence(
        metrics=pd.DataFrame(metrics | changes),
        completions=pd.DataFrame(completions),
        exit_code=0,
        killed=tuple(deaths.values()),
    )


def killed(**changes):
    return evidence(DEATHS, **changes)


def without_its_last_step(run):
    return replace(run, metrics=run.metrics.iloc[:-1].assign(**{"val/accuracy": 0.75}))


def found(calm, other):
    return script.findings(calm, other, NUM_STEPS)


def denied(calm, other):
    return shared.denied(found(calm, other))


# What is found


def test_deaths_that_cost_nothing_are_found_to_be_such():
    assert denied(evidence(), killed()) == set()


DENIED = {
    "both runs came to their end": {
        "the killed run fails": (evidence(), replace(killed(), exit_code=5)),
        "the other run fails": (replace(evidence(), exit_code=1), killed()),
        "both fail alike": (replace(evidence(), exit_code=1), replace(killed(), exit_code=1)),
        "the killed run is short": (evidence(), without_its_last_step(killed())),
        "the other run is short": (without_its_last_step(evidence()), killed()),
    },
    "every kill was followed by one restart": {
        "one is not": (evidence(), killed(**{"rollout/restarts": [0, 1, 0, 0]})),
        "one is followed by two": (evidence(), killed(**{"rollout/restarts": [0, 1, 2, 0]})),
        "nothing was killed": (evidence(), evidence()),
        "restarts are not known": (evidence(), killed(**{"rollout/restarts": NAN})),
    },
    "no row was lost": {
        "one is": (evidence(), killed(**{"rollout/failed_fraction": [0, 0, 1 / 1024, 0]})),
        "nobody knows": (evidence(), killed(**{"rollout/failed_fraction": NAN})),
    },
    "every restart was proven": {
        "one is not": (evidence(), killed(**{"sampler/proof_difference": [1e-6, 1e-6, NAN, NAN]})),
    },
    "no completion is of other weights": {
        "one is": (evidence(), killed(**{"sampler/logprob_difference_max": [0, 0, 0.01, 0]})),
        "nobody knows": (evidence(), killed(**{"sampler/logprob_difference_max": NAN})),
    },
    "the accuracy is that of the run in peace": {
        "it is lower": (evidence(), killed(**{"val/accuracy": [0.5, NAN, NAN, 0.71]})),
        "it is higher": (evidence(), killed(**{"val/accuracy": [0.5, NAN, NAN, 0.79]})),
        "only an earlier one is": (evidence(), killed(**{"val/accuracy": [0.75, NAN, NAN, NAN]})),
    },
}  # fmt: skip
"""Finding -> runs that do not deserve it."""


def test_every_finding_can_be_denied():
    assert DENIED.keys() == found(evidence(), killed()).keys()


@pytest.mark.parametrize(
    ("finding", "case"), [(finding, case) for finding, cases in DENIED.items() for case in cases]
)
def test_runs_that_do_not_deserve_a_finding_do_not_get_it(finding, case):
    assert denied(*DENIED[finding][case]) == {finding}


def test_an_accuracy_within_the_noise_of_so_few_sums_is_the_same():
    assert denied(evidence(), killed(**{"val/accuracy": [0.5, NAN, NAN, 0.73]})) == set()


def test_equal_completions_are_counted():
    other = killed()
    statement = "the accuracy is that of the run in peace"
    assert "; 100.0% of completions are equal" in found(evidence(), other)[statement][1]
    other.completions.at[2, "token_ids"] = [4, 6]
    assert "; 75.0% of completions are equal" in found(evidence(), other)[statement][1]
    fewer = replace(other, completions=other.completions.iloc[1:])
    assert "; 0.0% of completions are equal" in found(evidence(), fewer)[statement][1]


def test_the_exit_code_says_whether_all_findings_hold(capsys):
    assert shared.exit_code_of(found(evidence(), killed())) == 0
    assert "no row was lost" in capsys.readouterr().out
    lost = killed(**{"rollout/failed_fraction": [0, 0, 0.5, 0]})
    assert shared.exit_code_of(found(evidence(), lost)) == 1
    assert "largest failed fraction 0.5" in capsys.readouterr().out


# What is killed

SERVER = """
(exec -a VLLM::EngineCore sleep 600) &
(exec -a VLLM::Worker sleep 600) &
wait
"""
TITLES = {"VLLM::EngineCore", "VLLM::Worker"}


@pytest.fixture
def trainer(tmp_path):
    """This process, with a server's processes under a guard, named as vLLM's."""
    program = tmp_path / "server.sh"
    program.write_text(SERVER)
    server = ServerProcess(["bash", str(program)], {}, tmp_path / "server.log")
    below = psutil.Process(server.pid).children
    try:
        wait_until(lambda: {word for one in below() for word in script.words(one)} >= TITLES)
        yield SimpleNamespace(pid=os.getpid(), poll=lambda: None)
    finally:
        server.end()


def test_each_process_of_a_server_is_found(trainer, tmp_path):
    victims = ("main process", "engine core", "worker")
    main, core, worker = (script.find(trainer.pid, victim) for victim in victims)
    assert main.cmdline() == ["bash", str(tmp_path / "server.sh")]
    assert core.cmdline()[0] == "VLLM::EngineCore"
    assert worker.cmdline()[0] == "VLLM::Worker"


def test_a_kill_waits_for_its_row(trainer, tmp_path):
    metrics, victims = tmp_path / "metrics.csv", []
    core, worker = (script.find(trainer.pid, victim) for victim in script.TITLES)
    kills = {2: "worker", 1: "engine core"}

    def kill():
        victims.extend(script.kill_on_the_way(trainer, metrics, kills))

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
    assert script.kill_on_the_way(trainer, tmp_path / "metrics.csv", script.KILLS) == []


# Whole runs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_before_a_server_that_is_killed_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))  # where the reward is
    model = tmp_path / "model"
    tiny_policy().save_pretrained(model)
    config = tmp_path / "small.yaml"
    config.write_text(json.dumps(SMALL))
    calm, other = (
        script.train(tmp_path / str(len(kills)), model, 20, kills, ["--config", str(config)])
        for kills in ({}, {2: "main process"})
    )
    assert shared.denied(script.findings(calm, other, 20)) == set()
    assert other.killed == ("main process",)
    assert processes_of(tmp_path) == []


def processes_of(run_dir):
    """What was started with a path below it, and is still there."""
    return [one for one in psutil.process_iter() if str(run_dir) in " ".join(script.words(one))]


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_thirty_steps_with_three_kills_end_as_well_as_those_in_peace(tmp_path):
    """The whole command, before a real vLLM."""
    python = f"--model.engine.init_args.launch.python={PYTHON}"
    run_to_its_end([*COMMAND, "--dir", str(tmp_path), "--", python], tmp_path, seconds=2000)
    restarts = pd.read_csv(tmp_path / "killed" / "metrics.csv")["rollout/restarts"]
    assert len(restarts) == script.NUM_STEPS == 30
    assert restarts.sum() == len(script.KILLS) == 3
    assert processes_of(tmp_path) == []


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
"""The quickstart with a few sums, before the tests' own server."""


def test_the_script_says_what_it_does():
    reply = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    assert "killed three times" in " ".join(reply.stdout.split())
