"""Run ``lit-grpo doctor`` in this process, and read what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lit_grpo.__main__ import main
from lit_grpo.cli.built_run import BuiltRun
from lit_grpo.cli.command_line import CommandLine
from lit_grpo.cli.parsing.invocation import read_invocation

FIX = re.compile(
    r"(^|[.:;?] )(Add|Check|Correct|Define|Export|Fill|Fix|Free|Give|Improve|Install|Lower|Map|"
    r"Point|Provide|Raise|Remove|Run|Set|Start) |(^|[.] )To [a-z ]+, (train|shard|lower|set) "
)
"""A sentence that says what to do."""


def doctor(capsys, *arguments: str, config: str = "base.yaml") -> tuple[int, dict[str, str]]:
    """Return the exit code and the lines of each check, the summary last.

    Every failed finding must say what to do.
    """
    exit_code = main(["doctor", f"--config={config}", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    shown: dict[str, str] = {}
    findings: list[str] = []
    name = ""
    for line in captured.out.splitlines():
        match = re.match(r"(ok|remark|failed) +(\w*)  ", line)
        is_summary = not match and line and line[0] != " "
        name = (match[2] or name) if match else "summary" if is_summary else name
        shown[name] = shown.get(name, "") + " " + " ".join(line.split())
        if match or is_summary:
            findings.append(" ".join(line.split()))
        elif findings:
            findings[-1] += " " + " ".join(line.split())
    failed = [one.removeprefix("failed ") for one in findings if one.startswith("failed ")]
    assert all(map(FIX.search, failed)), failed
    return exit_code, shown


def write_rows(*rows: dict, **settings) -> list[str]:
    """Write rows to train on, and return the arguments for them."""
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"train": "rows.jsonl", "prompts_per_step": 2, "validation_size": 0} | settings
    return [f"--data={json.dumps({'class_path': 'PromptData', 'init_args': given})}"]


def policy_from(path: str) -> list[str]:
    return ["--model.policy.architecture=null", f"--model.policy.path={path}"]


def engine(kind: str, **settings) -> str:
    return f"--model.engine={json.dumps({'class_path': kind, 'init_args': settings})}"


def rewarded(class_path: str, **settings) -> str:
    """Return the argument for a run with one reward."""
    return f"--model.rewards={json.dumps([{'class_path': class_path, 'init_args': settings}])}"


def judged(server_url: str, **settings) -> str:
    """Return the argument for a run with a judge, by default one that needs no key."""
    judge = {"model": "m", "base_url": server_url, "auth": "none"} | settings
    return rewarded("JudgeReward", judge=judge)


def read_run(*arguments: str, command: str = "doctor", config: str = "base.yaml") -> BuiltRun:
    """Return the run that a command would check."""
    invocation = read_invocation([f"--config={config}", *arguments])
    return BuiltRun(CommandLine(command, invocation, "run"))
