"""A callback that watches a metric that nothing logs ends a run in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from run_logs import workplace

from lit_grpo.__main__ import main


@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint"])
def test_the_metrics_that_there_are_are_listed(kind, tmp_path, capsys):
    callback = {"class_path": kind, "init_args": {"monitor": "val/acuracy", "mode": "max"}}
    trainer = {"check_val_every_n_epoch": None, "val_check_interval": 1, "callbacks": [callback]}
    with workplace(tmp_path):
        config = BASE | {"trainer": BASE["trainer"] | trainer}
        Path("my.yaml").write_text(yaml.safe_dump(config))
        assert main(["fit", "--config=my.yaml", "--run_dir=my"]) == 2
        log = Path("my/run.log").read_text()
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: {kind} watches val/acuracy, which nothing logs. Logged are val/"
    )
    assert "val/accuracy, val/mean_length" in line
    assert "Did you mean val/accuracy? Correct its monitor" in line
    assert "Traceback" in log
