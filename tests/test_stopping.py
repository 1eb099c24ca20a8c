from __future__ import annotations

import re
import signal

from lightning.pytorch.callbacks import Callback
from paths import ROOT
from toy_rollouts import fit, outputs, rollouts

from lit_grpo.stopping import (
    SIGNAL_CODE,
    SIGNAL_MEANING,
    ExitCode,
    exit_code_of_error,
    exit_code_of_signal,
    get_stop_reason,
    stop_run,
)
from lit_grpo.types import Diverged, EngineFailed, StopReason, UserError


class StopTwice(Callback):
    def on_train_batch_end(self, trainer, *args):
        for message in ("first", "second"):
            stop_run(trainer, StopReason(exit_code=7, message=message))


def test_a_stopped_run_ends_after_its_step_without_a_validation_and_keeps_the_first_reason():
    step = outputs(rollouts([[0.0, 1.0]]))
    trainer = fit(lambda _: step, [StopTwice()], steps=3, validate_every=1)
    assert trainer.global_step == 1
    assert get_stop_reason(trainer).message == "first"
    assert "val/accuracy" not in trainer.callback_metrics


def test_a_run_that_nothing_stopped_has_no_reason():
    assert get_stop_reason(fit(lambda _: {}, [], steps=1)) is None


def test_exit_codes_of_signals_are_those_of_shells():
    assert exit_code_of_signal(signal.SIGTERM) == 143
    assert exit_code_of_signal(signal.SIGINT) == ExitCode.INTERRUPTED


def test_the_documented_exit_codes_are_those_of_the_table():
    """Each row of the documentation may say more than the table, after the same words."""
    page = (ROOT / "docs" / "configuration.md").read_text()
    section = page.split("## Exit codes\n")[1].split("\n## ")[0].replace("`", "")
    rows = dict(re.findall(r"^\| ([^|]+?) \| (.+) \|$", section, re.MULTILINE))
    expected = {str(code.value): code.meaning for code in ExitCode} | {SIGNAL_CODE: SIGNAL_MEANING}
    assert rows.keys() == {"code", "others"} | expected.keys()
    for code, meaning in expected.items():
        assert rows[code].startswith(meaning), code


def test_exit_codes_of_errors_are_those_of_the_command_line():
    errors = (KeyboardInterrupt(), EngineFailed(), Diverged(), UserError(), ValueError())
    assert [exit_code_of_error(error) for error in errors] == [130, 5, 6, 2, 1]
