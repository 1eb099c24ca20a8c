"""The guide's own objective, played as a user would."""

import re
from pathlib import Path

import pandas as pd
import pytest
from processes import LIT_GRPO, run_program

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "objective.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(), flags=re.S)


def test_the_guides_surrogate_and_advantage_train_and_are_logged_and_checked(tmp_path):
    (python,), (config,), (command,) = blocks("python"), blocks("yaml"), blocks("bash")
    for text in (python, config):
        (tmp_path / text.split()[1]).write_text(text)
    for function in re.split(r"\n\n\n", python)[1:]:
        assert function.count("\n") < 20
    short = ["--trainer.max_steps", "4", "--run_dir", "run"]
    program = [*LIT_GRPO, *command.split()[1:], *short]
    run_program(program, tmp_path)
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert metrics["own/bounded_ratio"].dropna().between(0.9, 1.1).all()
    assert len(metrics["own/bounded_ratio"].dropna()) == 2
    assert (metrics["advantage/max"].dropna() == 1).all()

    wrong = re.sub(r"return -(bounded.*)", r"return -(\1).sum()", python)
    assert wrong != python
    (tmp_path / "my_objective.py").write_text(wrong)
    result = run_program([*program[:-1], "other"], tmp_path, exit_code=2)
    shown = result.stdout + result.stderr
    assert "Traceback" not in shown
    assert re.search(r"my_objective\.soft_clip .*my_objective\.py:5\)", shown), shown

    broken = re.sub(r"return -(bounded.*)", r"return -inputs.typo", python)
    (tmp_path / "my_objective.py").write_text(broken)
    result = run_program([*program[:-1], "third"], tmp_path, exit_code=1)
    assert "error: my_objective.soft_clip " in result.stderr
    shown = result.stderr[result.stderr.index("error: ") :]
    assert re.search(r"recent call last\):\n  File .*my_objective\.py", shown), shown
    assert shown.endswith("AttributeError: 'LossInputs' object has no attribute 'typo'\n")
    assert "lightning" not in shown

    infinite = re.sub(
        r"return -(bounded.*)", r"return -(\1) / (1 if inputs.ratio.eq(1).all() else 0)", python
    )
    (tmp_path / "my_objective.py").write_text(infinite)
    result = run_program([*program[:-1], "fourth"], tmp_path, exit_code=1)
    assert "Traceback" not in result.stderr
    (line,) = [one for one in result.stderr.splitlines() if one.startswith("error: ")]
    assert "First check what my_objective.soft_clip" in line
