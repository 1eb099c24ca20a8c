import subprocess
import sys

import pytest

from lit_grpo.__main__ import COMMANDS, main


def test_help_names_every_command_and_every_bundled_config(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in [*COMMANDS, "quickstart"]:
        assert f"\n  {name}" in shown


def test_no_arguments_show_the_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: lit-grpo COMMAND")


def test_version_is_the_one_of_the_distribution(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lit-grpo {version('lit-grpo')}\n"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("validat", "error: validat: no such command. Did you mean validate?\n"),
        (
            "--config",
            "error: --config: no such command. Choose from sft, fit, validate, test, rewards, "
            "judge-check, rescore, report.\n",
        ),
    ],
)
def test_unknown_command_is_one_line_and_exit_code_2(command, line, capsys):
    assert main([command]) == 2
    assert capsys.readouterr().err == line


def test_report_of_nothing_says_what_it_needs(capsys):
    assert main(["report"]) == 2
    assert "error: report needs the directory of one or more runs" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from lit_grpo.__main__ import main; main(['--help'])\n"
        "heavy = {'torch', 'lightning', 'transformers', 'pandas', 'jsonargparse', 'omegaconf'}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
