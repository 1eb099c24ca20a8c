import gc
import re
import subprocess
import sys

import pytest

from lit_grpo.__main__ import importing, main
from lit_grpo.cli.commands import COMMANDS, OWN_EXIT_CODES, WITHOUT_CONFIG
from lit_grpo.cli.options import OPTIONS
from lit_grpo.stopping import SIGNAL_CODE, ExitCode


def test_help_lists_every_command_bundled_config_and_exit_code(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in [*COMMANDS, "quickstart", "presets/dapo"]:
        assert f"\n  {name}" in shown
    for code in ExitCode:
        assert re.search(rf"\n  {code:d} +{re.escape(code.meaning)}\n", shown)
    assert f"\n  {SIGNAL_CODE}" in shown
    for command, meanings in OWN_EXIT_CODES.items():
        for code, meaning in meanings.items():
            assert re.search(rf"\n  {command} +{code}  {re.escape(meaning)}\n", shown)


def test_without_arguments_the_help_is_shown(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: lit-grpo COMMAND")


def test_version_is_that_of_the_distribution(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lit-grpo {version('lit-grpo')}\n"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("validat", "error: validat: no such command. Did you mean validate?\n"),
        ("--versoin", "error: --versoin: no such command. Did you mean --version?\n"),
        ("train", "error: train: no such command. Did you mean fit?\n"),
        (
            "--config",
            "error: --config: no such command. Put the command before its options. Choose from "
            "sft, fit, validate, test, prepare, precompute, analyze, doctor, plan, rewards, "
            "judge-check, rescore, report, checkpoints, wandb-sync.\n",
        ),
    ],
)
def test_an_unknown_command_is_one_line_and_exit_code_2(command, line, capsys):
    assert main([command]) == 2
    assert capsys.readouterr().err == line


def test_report_without_a_directory_says_what_it_needs(capsys):
    assert main(["report"]) == 2
    assert (
        "error: report needs RUN ...: one run, the stages of one training"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("arguments", [["--help"], ["runs/my/0", "-h"]])
def test_help_of_report_says_what_it_does_and_gives_examples(arguments, capsys):
    assert main(["report", *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: lit-grpo report RUN ... [OPTIONS]\n")
    for words in ("Draw runs", "--follow", "  lit-grpo report runs/my/0\n", "comparison-1.html"):
        assert words in shown


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in WITHOUT_CONFIG])
def test_help_of_a_command_says_what_it_does_and_gives_examples(command, capsys):
    assert main([command, "--help"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    argument = "RUN" if command == "rescore" else "[RUN]"
    assert first == f"usage: lit-grpo {command} {argument} [--config FILE ...] [--KEY VALUE ...]"
    assert lines[1].lower() == f"{COMMANDS[command]}.".lower()
    assert lines[5] == "examples:"
    assert lines[6].startswith(f"  lit-grpo {command} ")


def test_help_of_a_command_without_an_argument_has_its_options_and_examples(capsys):
    assert main(["prepare", "--help"]) == 0
    usage, _, purpose, _, *lines = capsys.readouterr().out.splitlines()
    assert usage == "usage: lit-grpo prepare [OPTIONS]"
    assert purpose.lower() == f"{COMMANDS['prepare']}."
    assert lines[0] == "options:"
    options = [line.split("  ")[1] for line in lines[1 : 1 + len(OPTIONS["prepare"])]]
    assert [one.split()[0] for one in options] == list(OPTIONS["prepare"])
    assert lines[len(options) + 2 : len(options) + 4] == ["examples:", "  lit-grpo prepare --list"]


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS), ["fit", "runs/my/0"]])
def test_all_of_the_help_can_be_asked_of_every_command(words, capsys):
    assert main([*words, "--help=all"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"usage: lit-grpo {words[0] if words else 'COMMAND'} ")
    assert shown.err == ""


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in ("fit", "report", "precompute"))]
)
def test_help_imports_nothing_heavy(arguments):
    script = (
        f"import sys; from lit_grpo.__main__ import main; main({arguments})\n"
        "heavy = {'torch', 'lightning', 'transformers', 'pandas', 'jsonargparse', 'omegaconf'}\n"
        "sys.exit(f'imported {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


@pytest.mark.slow
def test_a_command_prints_nothing_of_what_libraries_log_while_they_are_imported():
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config", "none"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = child.stderr.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize("is_imported", [False, True])
def test_garbage_is_not_looked_for_during_the_first_import(monkeypatch, is_imported):
    monkeypatch.setitem(sys.modules, "lit_grpo.cli.app", None)
    if not is_imported:
        monkeypatch.delitem(sys.modules, "lit_grpo.cli.app")
    num_kept = gc.get_freeze_count()
    with importing():
        assert gc.isenabled() == is_imported
    assert gc.isenabled()
    assert (gc.get_freeze_count() > num_kept) != is_imported  # some that were kept may be gone


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_the_process_or_change_its_exit_code():
    script = (
        "import sys, threading, time; from lit_grpo import __main__\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "__main__.SHUTDOWN_SECONDS = 0.1\n"
        "sys.exit(__main__.main(['report']))"
    )
    child = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, timeout=200)
    assert child.returncode == ExitCode.WRONG_INPUT


SWALLOWS = """
import os, signal, sys
from lit_grpo.__main__ import exiting_at_once

class Prints:
    def __str__(self):
        os.kill(os.getpid(), signal.SIGINT)
        return ""

def interrupted():
    try:
        print(Prints(), file=sys.stderr, flush=True)
    except (KeyboardInterrupt, RuntimeError):
        print("swallowed", flush=True)

interrupted()
with exiting_at_once():
    interrupted()
"""


def test_ctrl_c_while_a_package_is_imported_cannot_be_swallowed():
    done = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "swallowed\n")
    assert done.stderr == "error: interrupted.\n"
