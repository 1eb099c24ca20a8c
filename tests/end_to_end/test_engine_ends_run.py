"""A server that cannot be restarted ends the run; the resumed run equals an undisturbed one.

The whole command line, with the tests' own server.
"""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from _checks import step_metrics
from engine_runs import command, num_steps, running
from forked_ranks import Importer
from paths import SUPPORT
from safetensors.torch import load_file
from served_engines import PROGRAM, QUICK, launched_servers
from sglang_server import OFFLINE
from tiny import tiny_policy
from worker_processes import is_alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 8
MIN_STEPS = 3
"""Steps that are finished before the server is killed."""
LAST_LINE = "the last GPU has fallen off the bus"
TIMELESS = ("reward/", "policy/", "completions/", "advantage/", "val/", "sampler/logprob_")
"""Prefixes of the metrics that measure neither time nor restarts."""


def program(broken: Path) -> list[str]:
    """Return the command of the server, which does not start while this file exists."""
    words = {"broken": str(broken), "last_line": LAST_LINE}
    quoted = {name: shlex.quote(word) for name, word in words.items()}
    code = "if [ -e {broken} ]; then echo {last_line}; exit 1; fi; ".format(**quoted)
    return ["/bin/sh", "-c", f'{code} exec {shlex.join(PROGRAM)} "$@"', "server"]


def config(model: Path, broken: Path) -> dict:
    """Return the changes to the quickstart: a few sums, and a single restart of the server."""
    return {
        "trainer": {"max_steps": NUM_STEPS, "val_check_interval": NUM_STEPS},
        "model": {
            "policy": {"path": str(model)},
            "rewards": [{"class_path": "small_runs.ShareOfLowBytes"}],
            "engine": {
                "class_path": "SGLangEngine",
                "init_args": {
                    "launch": {"program": program(broken), "env": OFFLINE},
                    "directory": "${run_dir}/engine",
                    "supervision": QUICK | {"max_restarts": 1},
                },
            },
        },
        "data": {
            "class_path": "AdditionData",
            "init_args": {"prompts_per_step": 4, "validation_size": 8, "validation_batch_size": 8},
        },
    }


WORDS = [*command("fit", "quickstart", {}), "--config", "small.yaml"]


def train(importer: Importer, directory: Path, *options: str) -> None:
    """Train to the end, forked; the run that its server ends is a new interpreter."""
    importer.run([*WORDS[3:], *options], directory)


def said(directory: Path) -> str:
    return (directory / "said.txt").read_text()


def metrics(directory: Path) -> pd.DataFrame:
    return step_metrics(directory / "run")


def timeless(table: pd.DataFrame) -> list[str]:
    return [name for name in table if name.startswith(TIMELESS)]


def final_weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "run" / "final" / "model.safetensors")


def kill_server_for_good(process, directory: Path, broken: Path) -> int:
    """Kill the server of a run during the generation of a step; return its process id."""
    wait_until(lambda: process.poll() is not None or num_steps(directory) >= MIN_STEPS, 240)
    assert process.poll() is None, said(directory)
    (server,) = launched_servers(process.pid)
    wait_until(lambda: server.log()["held"] > 0)
    broken.touch()
    server.kill()
    return server.pid


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Directories of two runs with the same initial model, and the file that breaks a server."""
    root = tmp_path_factory.mktemp("runs")
    tiny_policy().save_pretrained(root / "model")
    for name in ("undisturbed", "broken"):
        (root / name).mkdir()
        changes = config(root / "model", root / f"{name}.txt")
        if name == "broken":
            hold = {"class_path": "holds.HoldServer", "init_args": {"step": MIN_STEPS}}
            changes["trainer"]["callbacks+"] = [hold]
        (root / name / "small.yaml").write_text(json.dumps(changes))
    return SimpleNamespace(
        undisturbed=root / "undisturbed", broken=root / "broken", mark=root / "broken.txt"
    )


@pytest.fixture(scope="module")
def ended(directories):
    """What a run has left that was ended by its server, before it is resumed."""
    directory = directories.broken
    with running(WORDS, directory, PYTHONPATH=str(SUPPORT)) as process:
        server = kill_server_for_good(process, directory, directories.mark)
        num_finished = num_steps(directory)
        exit_code = process.wait(240)
    checkpoint = directory / "run" / "checkpoints" / "last.ckpt"
    return SimpleNamespace(
        exit_code=exit_code,
        num_finished=num_finished,
        is_server_alive=is_alive(server),
        said=said(directory),
        metrics=metrics(directory),
        completions=sorted(path.name for path in (directory / "run" / "completions").iterdir()),
        checkpoint=torch.load(checkpoint, weights_only=False, map_location="cpu"),
        has_final=(directory / "run" / "final").exists(),
    )


def test_the_run_ends_with_exit_code_5_and_the_end_of_the_servers_log(ended):
    assert ended.exit_code == 5, ended.said
    assert (
        "was restarted 1 times in a row and is still unhealthy: it exited before it" in ended.said
    )
    *_, last, advice = ended.said.strip().splitlines()
    assert last == LAST_LINE
    assert advice == f"Resume after {ended.num_finished} steps with: lit-grpo fit run"
    assert "Traceback" not in ended.said
    assert not ended.is_server_alive


def rows_of_the_unfinished_step(ended) -> pd.DataFrame:
    assert ended.metrics["step"][: ended.num_finished].tolist() == list(range(ended.num_finished))
    return ended.metrics[ended.num_finished :]


def test_the_unfinished_step_leaves_no_result_no_completions_and_no_final_model(ended):
    assert MIN_STEPS <= ended.num_finished < NUM_STEPS
    results = rows_of_the_unfinished_step(ended)[timeless(ended.metrics)]
    assert results.isna().all(axis=None)
    files = [f"step_{step:06d}.parquet" for step in range(ended.num_finished)]
    assert ended.completions == files
    assert not ended.has_final


def test_the_unfinished_step_does_not_repeat_the_durations_of_the_one_before(ended):
    durations = ["timing/generation_duration_s", "timing/update_duration_s"]
    before = ended.metrics[durations].iloc[ended.num_finished - 1]
    assert not (rows_of_the_unfinished_step(ended)[durations] == before).any(axis=None)


def test_the_checkpoint_is_that_of_the_last_finished_step(ended):
    assert ended.checkpoint["global_step"] == ended.num_finished


def test_the_run_resumed_with_a_working_server_equals_an_undisturbed_run(
    ended, directories, importer
):
    train(importer, directories.undisturbed)
    directories.mark.unlink()
    train(importer, directories.broken, "--ckpt_path", "last")
    runs = (directories.undisturbed, directories.broken)
    expected, resumed = map(final_weights, runs)
    torch.testing.assert_close(resumed, expected, rtol=0, atol=0)
    tables = list(map(metrics, runs))
    assert len(tables[0]) == NUM_STEPS
    names = ["step", *timeless(tables[0])]
    pd.testing.assert_frame_equal(*(table[names] for table in tables))
