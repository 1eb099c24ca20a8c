"""The recipe of the rubric run: killed between and inside its stages, it ends as undisturbed."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pandas as pd
import pytest
from forked_ranks import Forked, Importer
from killed_run import TIMELESS
from paths import ROOT
from processes import start
from worker_processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SCRIPT = ROOT / "scripts" / "_rubric_recipe.py"
NUM_STEPS = 10


def begin(directory: Path) -> Popen[str]:
    words = [sys.executable, str(SCRIPT), str(directory), "--steps", str(NUM_STEPS)]
    return start(words, said=directory / "said.txt", PYTHONPATH=str(ROOT))


def num_rows(path: Path) -> int:
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def has_votes(directory: Path) -> bool:
    return any(num_rows(one) > 20 for one in directory.glob("gold/judge-*/*.jsonl"))


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "after the data of the warm-up": lambda run: (run / "warm_up_data").exists(),
    "between two votes": has_votes,
    "in the warm-up": lambda run: (run / "warm_up/checkpoints/step_000020.ckpt.json").exists(),
    "in GRPO": lambda run: num_rows(run / "grpo/metrics.csv") >= 7,
    "before the evaluation": lambda run: (run / "grpo/final").exists(),
}


@contextmanager
def going_on(importer: Importer, directory: Path) -> Iterator[Forked]:
    directory.mkdir(exist_ok=True)
    words = [str(directory), "--steps", str(NUM_STEPS)]
    with importer.running(words, directory, program="forked_recipe") as started:
        yield started.processes[0]


def kill_at(moment: str, importer: Importer, directory: Path) -> None:
    with going_on(importer, directory) as process:
        wait_until(lambda: MOMENTS[moment](directory) or process.poll() is not None, 400)
        process.kill_group()
        assert process.wait(), moment


def products(directory: Path) -> dict[str, object]:
    """Return what the stages have made, without times."""
    files = [*directory.glob("*/*.parquet"), *directory.glob("*/final/model.safetensors")]
    hashes = {
        str(one.relative_to(directory)): hashlib.sha256(one.read_bytes()).hexdigest()
        for one in files
    }
    votes = [
        json.dumps(json.loads(line))
        for one in directory.glob("gold/judge-*/*.jsonl")
        for line in one.read_text().splitlines()
    ]
    assert len(votes) == len(set(votes)) == 80 * 4 * 2
    return hashes | {
        "votes": sorted(votes),
        "accuracies": json.loads((directory / "accuracies.json").read_text()),
    }


def metrics(directory: Path) -> pd.DataFrame:
    table = pd.read_csv(directory / "grpo" / "metrics.csv")
    return table[["step", *sorted(name for name in table if name.startswith(TIMELESS))]]


def test_a_recipe_that_is_killed_again_and_again_ends_as_an_undisturbed_one(tmp_path, importer):
    """The last one and its commands are new interpreters, the others are forked."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with going_on(importer, whole) as undisturbed:
        for moment in MOMENTS:
            kill_at(moment, importer, broken)
        with begin(broken) as process:
            assert process.wait(600) == 0, (broken / "said.txt").read_text()
        assert undisturbed.wait(600) == 0, (whole / "said.txt").read_text()
    assert products(broken) == products(whole)
    assert metrics(whole)["step"].tolist() == list(range(NUM_STEPS))
    pd.testing.assert_frame_equal(metrics(broken), metrics(whole))
    said = (broken / "said.txt").read_text()
    assert "lit-grpo prepare" not in said
    assert "after GRPO" in said
    assert (broken / "grpo" / "report.html").exists()
