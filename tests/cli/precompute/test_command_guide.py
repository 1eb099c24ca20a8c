"""The guide's recipe from raw files to a mixture prints what the guide shows."""

from __future__ import annotations

import re
import runpy
import shlex
from collections import Counter
from pathlib import Path

from judge_server import Behaviour, JudgeServer, Request, Section, judges
from paths import ROOT
from stored_answers import GRADES

from lit_grpo.__main__ import main
from lit_grpo.data.rows.prepared import find_prepared

GUIDE = ROOT / "docs/guides/data.md"


def section() -> str:
    text = GUIDE.read_text()
    return text.split("## From raw files to a mixture\n")[1].split("\n## ")[0]


def steps() -> list[tuple[str, str]]:
    """The commands of the section with what they print."""
    pairs = r"^```sh\n(lit-grpo [^\n]*)\n```\n\n```text\n(.*?)^```$"
    return re.findall(pairs, section(), re.DOTALL | re.MULTILINE)


def write_files() -> None:
    for name in ("recipe.yaml", "make_rows.py"):
        block = rf"^```\w+\n# {re.escape(name)}\n(.*?)^```$"
        (text,) = re.findall(block, GUIDE.read_text(), re.DOTALL | re.MULTILINE)
        Path(name).write_text(text)
    runpy.run_path("make_rows.py")


def changeable() -> Behaviour:
    """Return a judge whose second vote differs on every third hill, and to whom some are alike."""
    seen: Counter[str] = Counter()

    def rule(request: Request, one: Section) -> dict[str, int]:
        seen[one.text] += 1
        hill = int(one.text.split()[1])
        best = 5 if hill % 6 == 0 else GRADES[one.text[-1]]
        return {"score": best + (seen[one.text] - 1) * (hill % 3 == 1)}

    return judges("answer", rule)


def test_the_guide_shows_what_the_commands_print(here, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    write_files()
    with JudgeServer(changeable()) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "x")
        assert len(steps()) == 5
        for command, shown in steps():
            main(shlex.split(command)[1:])
            said = capsys.readouterr()
            lines = [line.rstrip() for line in (said.out + said.err).splitlines()]
            assert lines == shown.splitlines(), "\n".join(lines)
    assert len(server.questions) == 20 * 3 * 2
    columns = [row.columns for row in find_prepared("prepared").split("train").rows()]
    assert {len(row["gold_scores"]) for row in columns} == {3, 4}
