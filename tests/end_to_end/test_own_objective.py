"""The guide's own objective, played as a user would."""

import re
import sys
from pathlib import Path

import pandas as pd
import pytest
from run_logs import workplace

from lit_grpo.__main__ import main

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "objective.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(), flags=re.S)


def test_the_guides_surrogate_and_advantage_train_and_are_logged(importer, tmp_path):
    (python,), (config,), (command,) = blocks("python"), blocks("yaml"), blocks("bash")
    for text in (python, config):
        (tmp_path / text.split()[1]).write_text(text)
    for function in re.split(r"\n\n\n", python)[1:]:
        assert function.count("\n") < 20
    short = ["--trainer.max_steps", "4", "--run_dir", "run"]
    importer.run([*command.split()[1:], *short], tmp_path)
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert metrics["own/bounded_ratio"].dropna().between(0.9, 1.1).all()
    assert len(metrics["own/bounded_ratio"].dropna()) == 2
    assert (metrics["advantage/max"].dropna() == 1).all()


@pytest.fixture
def failing(tmp_path, monkeypatch, capsys):
    """Run the guide's surrogate with another last line; return the exit code and the message."""

    def run(last_line: str, line: str = r"return -(bounded.*)") -> tuple[int, str]:
        (python,), (config,), _ = blocks("python"), blocks("yaml"), blocks("bash")
        changed = re.sub(line, last_line, python)
        assert changed != python
        (tmp_path / "my_objective.py").write_text(changed)
        (tmp_path / "own.yaml").write_text(config)
        monkeypatch.delitem(sys.modules, "my_objective", raising=False)
        words = ["--config", "debug", "--config", "own.yaml", "--trainer.max_steps", "4"]
        with workplace(tmp_path):
            exit_code = main(["fit", *words])
        shown = capsys.readouterr().err
        return exit_code, shown[shown.index("error: ") :] if "error: " in shown else ""

    return run


def test_a_wrong_shape_is_named_with_the_function_and_its_line(failing):
    exit_code, shown = failing(r"return -(\1).sum()")
    assert exit_code == 2
    assert shown.count("\n") == 1
    assert re.search(r"my_objective\.soft_clip .*my_objective\.py:7\)", shown), shown


def test_a_wrong_signature_is_one_line_before_anything_is_loaded(failing, tmp_path):
    exit_code, shown = failing("def soft_clip(ratio)", r"def soft_clip\(.*\)")
    assert exit_code == 2
    assert shown.count("\n") == 1
    assert "objective.surrogate must be a function of inputs and objective" in shown
    assert re.search(r"my_objective\.py:7\), which takes \(ratio\)", shown), shown
    assert "Define def soft_clip(inputs, objective)" in shown
    assert not (tmp_path / "runs").exists()


def test_an_exception_is_shown_from_the_users_line_on(failing):
    exit_code, shown = failing("return -inputs.typo")
    assert exit_code == 1
    assert shown.startswith("error: my_objective.soft_clip ")
    assert re.search(r"recent call last\):\n  File .*my_objective\.py", shown), shown
    assert shown.endswith("AttributeError: 'LossInputs' object has no attribute 'typo'\n")
    assert "lightning" not in shown


def test_values_that_become_infinite_later_name_the_function(failing, tmp_path):
    is_first = "(inputs.ratio - 1).abs().max() < 1e-5"
    exit_code, shown = failing(rf"return -(\1) / (1 if {is_first} else 0)")
    assert (exit_code, shown) == (0, "")  # the first of two optimizer steps is taken each time
    metrics = pd.read_csv(tmp_path / "runs/debug-own/0/metrics.csv")
    assert metrics["policy/skipped_fraction"].max() == 0.5
    log = (tmp_path / "runs/debug-own/0/run.log").read_text()
    assert "First check what my_objective.soft_clip" in log
