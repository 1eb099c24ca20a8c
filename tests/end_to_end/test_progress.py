"""What a user sees while a step is running: in a real terminal, and in a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from forked_ranks import Importer
from terminal import shown_in_terminal

# Every count lasts until it is shown.
SLOW = r"""
import re
import time
from pathlib import Path
from lightning.pytorch import Callback
from lit_grpo.rewards import Reward
from lit_grpo.rollout import HFEngine

def read_screen():
    text = Path("screen").read_bytes().decode(errors="ignore")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)

def wait_until(condition):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if condition(read_screen()):
            return
        time.sleep(0.02)

def is_shown(pattern):
    return lambda text: re.search(pattern, text)

class SlowEngine(HFEngine):
    def generate(self, prompts, group_size, *args, **settings):
        total = len(prompts) * group_size
        items = super().generate(prompts, group_size, *args, **settings)
        for number, item in enumerate(items):
            wait_until(is_shown(f"(generate|validate) {number}/{total}"))
            yield item

class SlowReward(Reward):
    num_scored = 0

    def score(self, prompt, completion):
        if self.num_scored < 4:
            wait_until(is_shown(f"score {self.num_scored}/4"))
        self.num_scored += 1
        return float(sum(completion.token_ids))

class OutOfService(Reward):
    def score(self, prompt, completion):
        if "waiting for missing scores" not in read_screen():
            raise ConnectionError("the service is down")
        return float(sum(completion.token_ids))

class SlowSave(Callback):
    def on_save_checkpoint(self, *_):
        wait_until(is_shown("saving a checkpoint"))

class SlowUpdate(Callback):
    def __init__(self, num_clocks: int = 0):
        self.num_clocks = num_clocks

    def on_before_optimizer_step(self, *_):
        wait_until(is_shown("update"))
        wait_until(lambda text: len({*re.findall(CLOCK, text)}) >= self.num_clocks)

CLOCK = r"(?<=0/1 )\d:\d\d:\d\d"
"""

BASIS = ("--config=base.yaml", "--trainer.max_steps=1", "--model.engine=slow.SlowEngine")
SLOW_STEP = ("--model.rewards=[slow.SlowReward]", "--trainer.callbacks=slow.SlowUpdate")
# The bar comes first, so that it shows the saving before `SlowSave` waits for that.
SLOW_SAVE = (
    "--trainer.callbacks=RolloutProgressBar",
    "--trainer.callbacks+=slow.SlowSave",
    "--trainer.callbacks+=slow.SlowUpdate",
    "--trainer.callbacks.num_clocks=3",
)
OUTAGE = (
    "--model.rewards=[slow.OutOfService]",
    "--model.outage.first_pause_seconds=0.5",
    "--model.outage.give_up_after_seconds=30",
)
VALIDATED = ("--trainer.check_val_every_n_epoch=null", "--trainer.val_check_interval=1")


@pytest.fixture
def here(tmp_path) -> Path:
    trainer = {key: value for key, value in BASE["trainer"].items() if "progress" not in key}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE | {"trainer": trainer}))
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def phases(lines: list[str]) -> list[str]:
    """The different things that a run was seen to do, in order."""
    verbs = ("sync", "generate", "score", "update", "validate")
    found = (one.split("  ")[0].strip() for one in lines if one.startswith(verbs))
    return list(dict.fromkeys(found))


@pytest.mark.slow
def test_a_step_shows_its_stages_their_counts_and_the_clock_while_it_runs(here, importer):
    slow = ("--model.rewards=[slow.SlowReward]", *SLOW_SAVE)
    lines = shown_in_terminal(importer, "fit", *BASIS, *slow, *VALIDATED, cwd=here)
    step = [one for one in lines if one.startswith("Training") and " 0/1 " in one]
    assert len({re.search(r"0:00:\d\d", one)[0] for one in step}) >= 3
    seen = phases(lines)
    assert {f"generate {n}/4" for n in range(4)} <= set(seen)
    assert {"score 2/4", "score 3/4", "validate 0/2", "validate 1/2"} <= set(seen)
    assert any(one.startswith("update ") for one in seen)
    assert any("tok/s" in one for one in lines if one.startswith("generate"))
    assert not any("Epoch" in one for one in lines)
    for silent in (
        "reading and tokenizing the train data",
        "loading the model",
        "saving a checkpoint",
        "writing the final model",
    ):
        assert any(one.startswith(silent) for one in lines), silent


@pytest.mark.slow
def test_a_warm_up_and_a_validation_show_what_they_do(here, importer):
    config = yaml.safe_load((here / "base.yaml").read_text())
    for key in ("rewards", "group_size"):
        del config["model"][key]
    (here / "warm.yaml").write_text(yaml.safe_dump(config))
    warm = ("--config=warm.yaml", *BASIS[1:], "--trainer.callbacks=slow.SlowUpdate")
    lines = shown_in_terminal(importer, "sft", *warm, *VALIDATED, cwd=here)
    assert {"update", "validate 1/2"} <= set(phases(lines))
    assert any(re.match(r"loss \d\.\d{4}  acc \d\.\d{3}", one) for one in lines)
    assert any(re.match(r"Training \S+ \S*\s*0/1 0:00:\d\d", one) for one in lines), lines
    assert not any("Epoch" in one for one in lines)
    lines = shown_in_terminal(importer, "validate", *BASIS, cwd=here)
    assert any(re.match(r"Validation \S+ 0/1 ", one) for one in lines)
    assert {"validate 0/2", "validate 1/2"} <= set(phases(lines))


def shown_in_file(importer: Importer, *arguments: str, cwd: Path) -> list[str]:
    """Return the lines that ``lit-grpo`` writes in a file, often also within a step."""
    bar = ["--trainer.callbacks+=RolloutProgressBar", "--trainer.callbacks.every_n_seconds=0.1"]
    screen = cwd / "screen"
    process = importer.start([*arguments, *bar], cwd, screen, TERM="xterm")
    assert process.wait() == 0, screen.read_text()
    return screen.read_text().splitlines()


@pytest.mark.slow
def test_a_file_gets_plain_lines_also_within_a_step(here, importer):
    lines = shown_in_file(importer, "fit", *BASIS, *SLOW_STEP, cwd=here)
    assert not any("\x1b" in one for one in lines)
    within = [one.removeprefix("step 0/1  ") for one in lines if one.startswith("step 0/1  ")]
    seen = phases(within)
    assert {f"generate {n}/4" for n in range(4)} <= set(seen)
    assert {f"score {n}/4" for n in range(4)} <= set(seen)
    assert any(re.match(r"step 1/1  \d+\.\d\d s/step  reward ", one) for one in lines)


@pytest.mark.slow
def test_a_run_that_waits_for_missing_scores_says_so_in_a_terminal_and_in_a_file(here, importer):
    """The service is back once the words are shown."""
    words = ("fit", *BASIS, *OUTAGE)
    lines = shown_in_terminal(importer, *words, "--run_dir=live", cwd=here)
    assert any(one.startswith("waiting for missing scores") for one in lines)
    lines = shown_in_file(importer, *words, "--run_dir=plain", cwd=here)
    assert any(one.startswith("step 0/1  waiting for missing scores") for one in lines)


LATE = r"""
class Late(Reward):
    num_scored = 0

    def score(self, prompt, completion):
        self.num_scored += 1
        if self.num_scored > 4:  # in the second step
            wait_until(is_shown(r" 1/3 \S+ • 0:"))
        return float(sum(completion.token_ids))
"""


@pytest.mark.slow
def test_the_time_that_is_left_is_shown_once_a_step_is_done(here, importer):
    (here / "slow.py").write_text(SLOW + LATE)
    words = ("--config=base.yaml", "--trainer.max_steps=3", "--model.rewards=[slow.Late]")
    lines = shown_in_terminal(importer, "fit", *words, cwd=here)
    assert any(re.search(r"^Training \S+ 1/3 0:00:\d\d • 0:00:\d\d", one) for one in lines), lines
