"""What the commands that try rewards need of a config, before they sample or ask anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cli_base import BASE

from lit_grpo.__main__ import main


def test_a_warm_up_has_no_rewards_to_try(here, capsys):
    model = BASE["model"].keys() - {"rewards", "group_size"}
    config = BASE | {"model": {key: BASE["model"][key] for key in model}}
    config["model"]["target_column"] = "answer"
    Path("warm.yaml").write_text(yaml.safe_dump(config))
    assert main(["rewards", "--config=warm.yaml"]) == 2
    assert "error: rewards needs rewards, and the model" in capsys.readouterr().err


def test_a_run_dir_that_cannot_be_written_is_refused_before_anything_is_sampled(
    here, capsys, monkeypatch
):
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    monkeypatch.setattr(
        "lit_grpo.cli.rewards.commands.read_prompts", lambda cli: pytest.fail("read")
    )
    assert main(["rewards", "--config=base.yaml", "--run_dir=/proc/x"]) == 2
    assert "error: run_dir must be a place that can be written, got /proc/x (" in (
        capsys.readouterr().err
    )
