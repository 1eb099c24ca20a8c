"""The line that a user sees of a config that is wrong."""

from __future__ import annotations

from pathlib import Path

from lit_grpo.__main__ import main

BASE = """
model:
  policy: {path: no_such_model}
  rewards: [MathReward]
data: {class_path: AdditionData, init_args: {num_digits: 1}}
"""


def error_of(capsys, *arguments: str, config: str = "{}") -> str:
    """Return the error of a run with this config on top of one that is right."""
    Path("base.yaml").write_text(BASE)
    Path("my.yaml").write_text(config)
    assert main(["fit", "--config=base.yaml", "--config=my.yaml", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")
