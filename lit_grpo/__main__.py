"""The command ``lit-grpo``: says what there is, hands over to the room that does it, and ends.

Nothing heavy is imported before a command is known, so that help answers at once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence

from lit_grpo import __version__
from lit_grpo.cli.configs import bundled_configs
from lit_grpo.cli.errors import complain, did_you_mean

COMMANDS = {
    "sft": "warm a policy up on the answers of the data, for GRPO to start from",
    "fit": "train a policy with GRPO",
    "validate": "measure a checkpoint on the validation prompts",
    "test": "measure a checkpoint on the test prompts",
    "rewards": "sample and score a few prompts without training: signal, time and cost of a step",
    "judge-check": "ask the judges of the config: do they answer and tell good from bad",
    "rescore": "score a run's logged completions again under changed rewards, and show what moves",
    "report": "draw and sum up the curves of one or more runs",
}

SHUTDOWN_SECONDS = 15.0

HELP = """\
usage: lit-grpo COMMAND [--config FILE ...] [--KEY VALUE ...]

commands:
{commands}

examples:
  lit-grpo sft --config quickstart_sft
  lit-grpo fit --config quickstart
  lit-grpo fit --config my.yaml --config more.yaml --model.group_size 16
  lit-grpo fit --config my.yaml --print_config
  lit-grpo fit --config runs/my/0/config.yaml --ckpt_path last
  lit-grpo validate --config runs/my/0/config.yaml --ckpt_path last
  lit-grpo rewards --config my.yaml --n 8
  lit-grpo judge-check --config my.yaml
  lit-grpo rescore runs/my/0 --config other_rewards.yaml --last 10
  lit-grpo report runs/my/0 runs/my/1

bundled configs (a file of that name in the working directory comes first):
{configs}

exit codes:
  0 done, 1 crashed (the traceback is in run.log), 2 wrong command, config or data,
  130 interrupted; a callback that stops a run chooses its own. judge-check: 1 where a judge
  cannot tell good from bad, 2 where it cannot be asked.

`lit-grpo COMMAND --help` lists every key of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code of the process."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        exit_code = dispatch(command, arguments)
    except KeyboardInterrupt:
        exit_code = complain("interrupted.", exit_code=130)
    end_within(SHUTDOWN_SECONDS, exit_code)
    return exit_code


def dispatch(command: str, arguments: list[str]) -> int:
    if command in ("-h", "--help"):
        print(help_text())
    elif command == "--version":
        print(f"lit-grpo {__version__}")
    elif command == "report":
        return report(arguments)
    elif command in COMMANDS:
        from lit_grpo.cli.app import run

        return run(command, arguments)
    else:
        hint = did_you_mean(command, COMMANDS) or f" Choose from {', '.join(COMMANDS)}."
        return complain(f"{command}: no such command.{hint}")
    return 0


def help_text() -> str:
    return HELP.format(
        commands="\n".join(f"  {name:<13}{purpose}" for name, purpose in COMMANDS.items()),
        configs="\n".join(f"  {name}" for name in bundled_configs()) or "  (none)",
    )


def report(run_dirs: list[str]) -> int:
    """The curves of ``run_dirs``, each the directory of one run."""
    if not run_dirs or run_dirs[0].startswith("-"):
        return complain("report needs the directory of one or more runs: lit-grpo report runs/my/0")
    from lit_grpo.runs.report import report

    try:
        report(run_dirs)
    except (ValueError, OSError) as error:
        return complain(str(error))
    return 0


def end_within(seconds: float, exit_code: int) -> None:
    """Ends the process with its exit code even if a thread or a logger hangs in its shutdown."""

    def watch() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        os._exit(exit_code)

    sys.stdout.flush()
    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
