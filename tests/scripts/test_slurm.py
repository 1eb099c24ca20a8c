"""The SLURM scripts: what they start is read by the parsers of srun's place and of lit-grpo."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from paths import ROOT

from lit_grpo.__main__ import main
from lit_grpo.runs.shutdown.signals import SIGNALS

SCRIPTS = sorted((ROOT / "scripts" / "slurm").iterdir())
JOBS = [path for path in SCRIPTS if path.suffix == ".sbatch"]
GUIDE = ROOT / "docs" / "guides" / "slurm.md"
SBATCH_OPTIONS = {"job-name", "time", "gpus", "requeue", "signal", "open-mode"}
"""Options of sbatch in its manual."""
PROGRAM = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
name, words = Path(sys.argv[0]).name, sys.argv[1:]
with open("calls.jsonl", "a") as calls:
    print(json.dumps([name, *words]), file=calls)
if words[:2] == ["show", "hostnames"]:
    print("n1", "n2", "n3", "n4", sep="\\n")
if "lit-grpo" in words:
    if "ADVANCE" in os.environ:
        directory = Path(words[words.index("--run_dir") + 1], "checkpoints")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "last.ckpt").unlink(missing_ok=True)
        (directory / "last.ckpt").symlink_to("step_000009.ckpt")
    sys.exit(int(os.environ.get("CODE", 0)))
"""
"""Stands for srun, scontrol and torchrun: it writes down how it was called."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory, with programs in the place of those of SLURM and torchrun."""
    (tmp_path / "bin").mkdir()
    programs = dict.fromkeys(("srun", "scontrol", "torchrun"), PROGRAM)
    for name, text in (programs | {"python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}).items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(script: Path, *words: str, **variables: str) -> tuple[int, list[list[str]]]:
    """Run a script; return its exit code and the calls of srun, scontrol and torchrun."""
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-4]"}
    path = {"PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(script), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | path | job | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = Path("calls.jsonl")
    calls = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
    said.unlink(missing_ok=True)
    assert "unbound variable" not in done.stderr
    return done.returncode, calls


def arguments(script: Path, *configs: str) -> list[str]:
    """Return the arguments of a job's script, with configs besides the one of GSM8K."""
    model = ["Qwen/Qwen2.5-7B"] if script.stem == "nodes" else []
    named = [word for name in ("gsm8k", *configs) for word in ("--config", name)]
    return ["runs/big/0", *model, *named, "--model.group_size", "16"]


def training(calls: list[list[str]]) -> tuple[list[str], list[str]]:
    """Return what the training is started with, and its own arguments."""
    (call,) = [call for call in calls if "lit-grpo" in call]
    place = call.index("lit-grpo")
    return call[:place], call[place + 1 :]


def parsed(words: list[str], capsys) -> dict:
    """Return the config that lit-grpo reads from its arguments."""
    with pytest.raises(SystemExit) as leave:
        main([*words, "--print_config"])
    assert leave.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def options(call: list[str]) -> dict[str, str]:
    """Return the options of srun or torchrun."""
    pairs = (word.partition("=") for word in call if word.startswith("--"))
    return {name: value for name, _, value in pairs}


def directives(script: Path) -> dict[str, str]:
    lines = script.read_text().splitlines()
    given = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH ")]
    found = (line.partition(" #")[0].strip() for line in given)  # without its comment
    return dict(line.partition("=")[::2] for line in found)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_a_script(script):
    subprocess.run(["shellcheck", str(script)], check=True)


def test_the_job_of_the_guide_starts_a_run_with_options_that_exist(here, capsys):
    """The guide's run goes on in the next job, which it asks for in time."""
    (text,) = re.findall(r"^```sh\n(#!/bin/bash.*?)^```$", GUIDE.read_text(), re.DOTALL | re.M)
    script = here / "job.sbatch"
    script.write_text(text)
    (here / "my.yaml").write_text(yaml.safe_dump(BASE))
    code, calls = run(script)
    assert code == 0
    start, words = training(calls)
    assert start == ["srun"]
    assert words[0] == "fit"
    config = parsed(words, capsys)
    assert (config["run_dir"], config["ckpt_path"], config["requeue"]) == (
        "runs/my/0",
        "auto",
        True,
    )
    given = directives(script)
    assert given.keys() <= SBATCH_OPTIONS
    name, _, seconds = given["signal"].partition("@")
    assert signal.Signals[f"SIG{name}"] in SIGNALS
    assert int(seconds) == 10 * 60


def test_a_job_on_one_machine_has_a_task_for_each_rank_and_gives_servers_the_other_gpus(
    here, capsys
):
    (script,) = [path for path in JOBS if path.stem == "one_node"]
    code, calls = run(script, *arguments(script))
    assert code == 0
    start, words = training(calls)
    config = parsed(words, capsys)
    assert words[0] == "fit"
    assert start[0] == "srun"
    trainer, engine = config["trainer"], config["model"]["engine"]
    assert (config["run_dir"], config["ckpt_path"], config["requeue"]) == (
        "runs/big/0",
        "auto",
        True,
    )
    assert config["model"]["group_size"] == 16
    assert str(trainer["devices"]) == directives(script)["ntasks-per-node"]
    assert trainer["num_nodes"] == 1
    launch = engine["init_args"]["launch"]
    gpus = [*range(int(trainer["devices"])), *map(int, launch["devices"])]
    assert gpus == list(range(int(directives(script)["gpus-per-node"])))
    assert launch["num_servers"] == len(launch["devices"])
    assert launch["memory_fraction"] == 0.9


def test_a_job_on_one_machine_with_as_many_ranks_as_gpus_shares_each_with_a_server(here, capsys):
    (script,) = [path for path in JOBS if path.stem == "one_node"]
    _, calls = run(script, *arguments(script), SLURM_NTASKS_PER_NODE="8", MEMORY_FRACTION="0.3")
    config = parsed(training(calls)[1], capsys)
    launch = config["model"]["engine"]["init_args"]["launch"]
    gpus = list(map(str, range(int(directives(script)["gpus-per-node"]))))
    assert config["trainer"]["devices"] in (len(gpus), str(len(gpus)))
    assert launch["devices"] == gpus
    assert (launch["num_servers"], launch["memory_fraction"]) == (len(gpus), 0.3)


def test_a_job_on_several_machines_starts_servers_where_no_ranks_are(here, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key")
    (script,) = [path for path in JOBS if path.stem == "nodes"]
    code, calls = run(script, *arguments(script), SERVER_PORT="8123")
    assert code == 0
    start, words = training(calls)
    config = parsed(words, capsys)
    trainer, engine = config["trainer"], config["model"]["engine"]["init_args"]
    given = options(start)
    assert given["--nodelist"] == "n1,n2"
    assert given["--nodes"] == str(trainer["num_nodes"]) == "2"
    assert given["--ntasks-per-node"] == str(trainer["devices"]) == "8"
    assert given["--ntasks"] == "16"
    assert engine["urls"] == ["http://n3:8123", "http://n4:8123"]
    assert engine["launch"] is None
    assert engine["directory"] == "runs/big/0/engine"
    assert engine["api_key_variable"] == "VLLM_API_KEY"
    assert config["model"]["policy"]["init_args"]["path"] == "Qwen/Qwen2.5-7B"
    assert config["model"]["group_size"] == 16
    servers = {options(call)["--nodelist"]: call for call in calls if "vllm" in call}
    assert servers.keys() == {"n3", "n4"}
    for host, call in servers.items():
        command = call[call.index("vllm") :]
        assert command[1:3] == ["serve", "Qwen/Qwen2.5-7B"]
        assert command[command.index("--host") + 1] == host
        assert command[command.index("--port") + 1] == "8123"
        assert not any(word.startswith("--api-key") for word in command)  # others could read it
    assert (here / "runs/big/0/key_guard/key_guard.py").is_file()


def test_a_job_whose_machines_all_have_ranks_is_refused(here):
    (script,) = [path for path in JOBS if path.stem == "nodes"]
    code, calls = run(script, *arguments(script), NUM_TRAINERS="4")
    assert code == 2
    assert not [call for call in calls if call[0] == "srun"]


@pytest.mark.slow
@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("exit_code", "has_advanced", "is_queued"),
    [(9, True, True), (137, True, True), (9, False, False), (1, True, False), (143, True, False),
     (7, True, False), (0, True, False)],
)  # fmt: skip
def test_a_job_is_queued_again_if_a_process_was_lost_and_the_run_had_advanced(
    script, exit_code, has_advanced, is_queued, here
):
    variables = {"ADVANCE": "1"} if has_advanced else {}
    code, calls = run(script, *arguments(script), CODE=str(exit_code), **variables)
    assert code == exit_code
    assert (["scontrol", "requeue", "77"] in calls) is is_queued


FSDP2 = "lit_grpo.distributed.fsdp2.FSDP2Strategy"
STRATEGIES = {"a config": "fsdp2", "a config with options": {"class_path": FSDP2, "init_args": {}}}
OWN = {"request_timeout": 60.0, "request_retries": 7, "max_concurrency": 8}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("way", ["nothing", "a config", "a config with options", "an argument"])
def test_the_strategy_is_the_users_or_else_ddp_with_a_short_timeout(script, way, here, capsys):
    strategy = {
        "a config": "fsdp2",
        "a config with options": {"class_path": FSDP2, "init_args": {}},
    }
    if given := strategy.get(way):
        Path("own.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": given}}))
    words = arguments(script, *(["own"] if given else []))
    if way == "an argument":
        words += ["--trainer.strategy", "fsdp2"]
    variables = {"MASTER_ADDR": "10.0.0.1", "NUM_NODES": "2", "RANK_OF_NODE": "1"}
    code, calls = run(script, *(words if script in JOBS else words[1:]), **variables)
    assert code == 0
    parsed_strategy = parsed(training(calls)[1], capsys)["trainer"]["strategy"]
    if way == "nothing":
        assert parsed_strategy["class_path"].endswith("DDPStrategy")
        assert parsed_strategy["init_args"]["timeout"] == "0:10:00"
    elif way == "a config with options":
        assert parsed_strategy["class_path"] == FSDP2
        assert parsed_strategy["init_args"]["timeout_minutes"] == 30
        assert "timeout" not in parsed_strategy["init_args"]
    else:
        assert parsed_strategy == "fsdp2"


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.stem)
def test_the_settings_of_the_engine_are_the_users(script, here, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key")
    engine = {"class_path": "VLLMServerEngine", "init_args": OWN}
    Path("own.yaml").write_text(yaml.safe_dump({"model": {"engine": engine}}))
    _, calls = run(script, *arguments(script, "own"))
    engine = parsed(training(calls)[1], capsys)["model"]["engine"]
    assert engine["class_path"].endswith("VLLMServerEngine")
    assert OWN.items() <= engine["init_args"].items()
    assert engine["init_args"]["directory"] == "runs/big/0/engine"


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.stem)
def test_a_job_may_be_queued_again_and_appends_to_its_output(script):
    assert directives(script)["requeue"] == ""
    assert directives(script)["open-mode"] == "append"


def test_torchrun_starts_as_many_ranks_as_lit_grpo_expects(here, capsys):
    (script,) = [path for path in SCRIPTS if path.stem == "torchrun"]
    variables = {"MASTER_ADDR": "10.0.0.1", "NUM_NODES": "2", "RANK_OF_NODE": "1"}
    code, calls = run(script, "--config", "gsm8k", "--run_dir", "runs/big/0", **variables)
    assert code == 0
    start, words = training(calls)
    config = parsed(words, capsys)

    from torch.distributed.run import parse_args

    theirs = parse_args([*start[1:], "lit-grpo", *words])
    assert (theirs.nnodes, theirs.node_rank, theirs.nproc_per_node) == ("2", 1, "8")
    assert (theirs.master_addr, theirs.master_port, theirs.no_python) == ("10.0.0.1", 29500, True)
    assert theirs.training_script_args == words
    trainer = config["trainer"]
    assert (trainer["num_nodes"], int(trainer["devices"])) == (2, int(theirs.nproc_per_node))
    assert config["ckpt_path"] == "auto"
