"""The completion script in a real bash."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from lit_grpo.__main__ import main

ASK = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_lit_grpo
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    pytest.importorskip("shtab")
    path = tmp_path_factory.mktemp("completion") / "lit-grpo"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["--print_completion", "bash"]) == 0
    return path


def complete(script, *words: str) -> list[str]:
    ask = ASK.format(script=script, words=shlex.join(["lit-grpo", *words]))
    result = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, cwd=script.parent)
    assert result.stderr == ""
    return result.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["re"], {"report", "rescore", "rewards"}),
        (["--ver"], {"--version"}),
        (["fit", "--model.group_"], {"--model.group_size"}),
        (["sft", "--model.target_"], {"--model.target_column"}),
        (["fit", "--model.objective.kl.estimator", "k"], {"k1", "k2", "k3"}),
        (["fit", "--trainer.benchmark", ""], {"false", "true"}),
        (["fit", "--model.engine", "HF"], {"HFEngine"}),
        (["fit", "--model.engine", "SG"], {"SGLangEngine"}),
        (["fit", "--model.engine", "Serv"], set()),  # only a base class
        (["fit", "--config", "quickstart"], {"quickstart", "quickstart_sft"}),
        (["sft", "-c", "presets/da"], {"presets/dapo"}),
        (["fit", "--config", "lit"], {"lit-grpo"}),
        (["do"], {"doctor"}),
        (["doctor", "--pro"], {"--probe"}),
        (["doctor", "ru"], {"runs"}),
        (["rewards", "--n"], {"--n"}),
        (["rescore", "--la"], {"--last"}),
        (["report", ""], {"runs"}),
        (["prepare", "--li"], {"--list"}),
        (["prepare", ""], set()),
        (["rewards", "ru"], {"runs"}),
        (["judge-check", "ru"], {"runs"}),
    ],
)
def test_commands_keys_and_listed_values_are_completed(script, words, found):
    (script.parent / "runs").mkdir(exist_ok=True)
    assert set(complete(script, *words)) == found


def test_a_key_of_another_command_is_not_offered(script):
    assert complete(script, "fit", "--model.target_") == []


@pytest.mark.parametrize("arguments", [[], ["ksh"]])
def test_an_unknown_shell_is_one_line_with_the_known_ones(arguments, capsys):
    assert main(["--print_completion", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: --print_completion must be one of bash, zsh")


def test_without_shtab_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print_completion", "bash"]) == 2
    assert capsys.readouterr().err.endswith("Install lit-grpo[completion].\n")
