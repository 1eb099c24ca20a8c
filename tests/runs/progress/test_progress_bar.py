from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import lightning as L
import pytest
import rich
from small_runs import fit as train
from small_runs import make_module, make_trainer, start_policy
from tiny import prompt
from toy_rollouts import fit, outputs, rollouts

from lit_grpo.callbacks import RolloutProgressBar
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.rollout import Sampling
from lit_grpo.runs.progress.progress_bar import metrics_line
from lit_grpo.training import SFTModule

METRICS = {
    "reward/mean": 0.5,
    "reward/std": 0.25,
    "policy/kl": 0.001,
    "completions/mean_length": 12.4,
    "perf/tokens_per_second": 1234.5,
}
STEP = outputs(rollouts([[0.0, 1.0]]), **METRICS)


def plain_lines(capsys, steps, every_n_steps, **options):
    bar = RolloutProgressBar(every_n_steps=every_n_steps)
    fit(lambda step: STEP, [bar], steps=steps, enable_progress_bar=True, **options)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


def test_without_a_terminal_there_is_a_plain_line_first_last_and_every_n_steps(capsys):
    lines = plain_lines(capsys, steps=7, every_n_steps=3)
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/7",
        "step 3/7",
        "step 6/7",
        "step 7/7",
    ]
    assert re.fullmatch(
        r"step 3/7  \d+\.\d\d s/step  \d:\d\d:\d\d left  reward 0\.500±0\.250  loss \d+\.\d{4}"
        r"  kl 0\.0010  len 12  tok/s 123[45]",
        lines[1],
    )


def test_each_validation_has_a_plain_line(capsys):
    lines = plain_lines(capsys, steps=4, every_n_steps=1, validate_every=2)
    assert [line for line in lines if "acc" in line] == [
        "step 2/4  validation  acc 0.500",
        "step 4/4  validation  acc 0.500",
    ]
    assert len(lines) == 6


def test_the_total_counts_rollout_steps_when_one_has_several_optimizer_steps(capsys):
    lines = plain_lines(capsys, steps=8, every_n_steps=2, num_updates=2)
    assert [line.split("  ")[0] for line in lines] == ["step 1/4", "step 2/4", "step 4/4"]


class Totals(L.Callback):
    """What the bar shows as the number of steps of the run, at its start and after each step."""

    def __init__(self, bar):
        self.bar = bar
        self.seen = []

    def on_train_start(self, *_):
        self.seen.append(self.bar.total_train_batches)

    def on_train_batch_end(self, *_):
        self.seen.append(self.bar.total_train_batches)


def grpo_run(callbacks):
    module = make_module(update={"epochs": 2, "minibatches": 2})
    train(module, callbacks=callbacks, max_steps=10, enable_progress_bar=True)


def sft_run(callbacks):
    trainer = make_trainer(
        *callbacks, max_steps=4, accumulate_grad_batches=3, enable_progress_bar=True
    )
    prompts = [prompt(f"{number}+1=", answer="2") for number in range(6)]
    module = SFTModule(start_policy(), sampling=Sampling(max_tokens=8))
    trainer.fit(module, PromptLoader(prompts, 1))


@pytest.mark.parametrize(("run", "num_steps"), [(grpo_run, 3), (sft_run, 12)])
def test_the_total_is_right_from_the_start_to_the_end(run, num_steps):
    bar = RolloutProgressBar()
    totals = Totals(bar)
    run([bar, totals])
    assert totals.seen == [num_steps] * (num_steps + 1)


def test_a_warm_up_shows_loss_and_accuracy():
    shown = metrics_line({"sft/loss": 0.123456, "val/accuracy": 0.75, "epoch": 3})
    assert shown == "loss 0.1235  acc 0.750"


def test_an_enormous_metric_is_shown_with_an_exponent():
    assert metrics_line({"reward/mean": -1.5e30}) == "reward -1.500e+30"


def test_zero_steps_between_lines_are_refused():
    with pytest.raises(ValueError, match="every_n_steps must be >= 1, got 0"):
        RolloutProgressBar(every_n_steps=0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_in_terminal(monkeypatch, run: Callable[[], object]) -> str:
    """What a terminal of 80 columns gets from a run, without its control sequences."""
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "stdout", screen)
        rich.reconfigure()
        run()
    rich.reconfigure()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


def test_in_a_terminal_there_is_one_live_bar_for_the_run(monkeypatch):
    bar, options = RolloutProgressBar(), {"validate_every": 2, "enable_progress_bar": True}
    shown = shown_in_terminal(monkeypatch, lambda: fit(lambda _: STEP, [bar], steps=4, **options))
    lines = re.split(r"[\r\n]+", shown)
    bars = [number for number, line in enumerate(lines) if line.startswith("Training")]
    assert " 4/4 " in lines[bars[-1]]
    metrics = lines[bars[-1] + 1].rstrip()
    assert re.fullmatch(
        r"reward 0\.500±0\.250  loss \S+  kl 0\.0010  len 12  tok/s 123[45]  acc 0\.500",
        metrics,
    )
    assert not any(line.startswith("step ") for line in lines)


class Output(nullcontext):
    """Stand in for the widget that rich draws in."""

    def clear_output(self, wait: bool) -> None: ...


@pytest.fixture
def notebook(monkeypatch):
    """Let rich see a notebook; return a function that sets what it finds there of ipywidgets."""
    displayed = []

    def set_widgets(module: object) -> list[object]:
        display = SimpleNamespace(display=displayed.append)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
        monkeypatch.setitem(sys.modules, "ipywidgets", module)
        rich.reconfigure(force_jupyter=True)
        return displayed

    yield set_widgets
    rich.reconfigure()


def test_a_notebook_without_ipywidgets_gets_plain_lines(notebook, capsys, recwarn):
    displayed = notebook(None)
    lines = plain_lines(capsys, steps=3, every_n_steps=2)
    assert [line.split("  ")[0] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]
    assert not displayed
    assert not [one for one in recwarn if "ipywidgets" in str(one.message)]


def test_a_notebook_with_ipywidgets_gets_the_bar(notebook, capsys):
    displayed = notebook(SimpleNamespace(Output=Output))
    bar = RolloutProgressBar(refresh_rate=1e-6)

    def step(number: int):
        bar._live.refresh()  # its thread would do it later
        return STEP

    fit(step, [bar], steps=3, enable_progress_bar=True)
    assert isinstance(displayed[0], Output)
    assert any("Training" in str(getattr(one, "text", "")) for one in displayed)
    assert "step 1/3" not in capsys.readouterr().out
