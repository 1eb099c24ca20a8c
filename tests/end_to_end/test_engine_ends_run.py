"""A server that dies for good ends the run, which is resumed from its checkpoint as if nothing had
been. The whole command, before the tests' own server."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from engine_runs import command, num_steps, running
from paths import SUPPORT
from safetensors.torch import load_file
from served_engines import PROGRAM, QUICK, launched_servers
from sglang_server import OFFLINE
from tiny import tiny_policy
from worker_processes import is_alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 8
LEAST_STEPS = 3
"""At least so many are whole when the server dies."""
LAST_WORDS = "the last GPU has fallen off the bus"
TIMELESS = ("reward/", "policy/", "completions/", "advantage/", "val/", "sampler/logprob_")
"""How the metrics begin that are neither times nor the engine's troubles."""


def program(broken: Path) -> list[str]:
    """The server, which does not start while this file is there."""
    words = {"broken": str(broken), "last_words": LAST_WORDS}
    quoted = {name: shlex.quote(word) for name, word in words.items()}
    code = "if [ -e {broken} ]; then echo {last_words}; exit 1; fi; ".format(**quoted)
    return ["/bin/sh", "-c", f'{code} exec {shlex.join(PROGRAM)} "$@"', "server"]


def config(model: Path, broken: Path) -> dict:
    """The quickstart with a few sums; it shall not outlive two deaths in a row."""
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


def training(directory: Path, *options: str):
    """The command on its way; it says everything in ``said.txt``."""
    words = [*command("fit", "quickstart", {}), "--config", "small.yaml", *options]
    return running(words, directory, PYTHONPATH=str(SUPPORT))


def train(directory: Path, *options: str) -> None:
    with training(directory, *options) as process:
        assert process.wait(240) == 0, said(directory)


def said(directory: Path) -> str:
    return (directory / "said.txt").read_text()


def metrics(directory: Path) -> pd.DataFrame:
    return pd.read_csv(directory / "run" / "metrics.csv")


def timeless(table: pd.DataFrame) -> list[str]:
    return [name for name in table if name.startswith(TIMELESS)]


def final_weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "run" / "final" / "model.safetensors")


def kill_its_server_for_good(process, directory: Path, broken: Path) -> int:
    """In the middle of a step's generation; returns the process id of the server."""
    wait_until(lambda: process.poll() is not None or num_steps(directory) >= LEAST_STEPS, 240)
    assert process.poll() is None, said(directory)
    (server,) = launched_servers(process.pid)
    server.faults(hang_generate=10**6)
    wait_until(lambda: server.log()["generating"] > 0)
    broken.touch()
    server.kill()
    return server.pid


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Of two runs from the same start."""
    root = tmp_path_factory.mktemp("runs")
    tiny_policy().save_pretrained(root / "model")
    for name in ("calm", "broken"):
        (root / name).mkdir()
        words = json.dumps(config(root / "model", root / f"{name}.txt"))
        (root / name / "small.yaml").write_text(words)
    return SimpleNamespace(calm=root / "calm", broken=root / "broken", mark=root / "broken.txt")


@pytest.fixture(scope="module")
def ended(directories):
    """What is left of a run whose server has died for good, before it is resumed."""
    directory = directories.broken
    with training(directory) as process:
        server = kill_its_server_for_good(process, directory, directories.mark)
        num_whole = num_steps(directory)
        exit_code = process.wait(120)
    checkpoint = directory / "run" / "checkpoints" / "last.ckpt"
    return SimpleNamespace(
        exit_code=exit_code,
        num_whole=num_whole,
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
    *_, last = ended.said.strip().splitlines()
    assert last == LAST_WORDS
    assert "Traceback" not in ended.said
    assert not ended.is_server_alive


def rows_of_the_step_in_flight(ended) -> pd.DataFrame:
    assert ended.metrics["step"][: ended.num_whole].tolist() == list(range(ended.num_whole))
    return ended.metrics[ended.num_whole :]


def test_the_step_in_flight_leaves_no_result_no_completions_and_no_final_model(ended):
    assert LEAST_STEPS <= ended.num_whole < NUM_STEPS
    results = rows_of_the_step_in_flight(ended)[timeless(ended.metrics)]
    assert results.isna().all(axis=None)
    files = [f"step_{step:06d}.parquet" for step in range(ended.num_whole)]
    assert ended.completions == files
    assert not ended.has_final


def test_the_step_in_flight_does_not_repeat_the_durations_of_the_one_before(ended):
    durations = ["timing/generation_duration_s", "timing/update_duration_s"]
    before = ended.metrics[durations].iloc[ended.num_whole - 1]
    assert not (rows_of_the_step_in_flight(ended)[durations] == before).any(axis=None)


def test_the_checkpoint_is_of_the_step_before(ended):
    assert ended.checkpoint["global_step"] == ended.num_whole


def test_resumed_with_a_server_that_works_it_ends_as_the_undisturbed_run(ended, directories):
    train(directories.calm)
    directories.mark.unlink()
    train(directories.broken, "--ckpt_path", "last")
    expected, resumed = (final_weights(one) for one in (directories.calm, directories.broken))
    assert expected.keys() == resumed.keys()
    for name, weight in expected.items():
        assert torch.equal(weight, resumed[name]), name
    tables = [metrics(one) for one in (directories.calm, directories.broken)]
    assert len(tables[0]) == NUM_STEPS
    names = ["step", *timeless(tables[0])]
    pd.testing.assert_frame_equal(*(table[names] for table in tables))
