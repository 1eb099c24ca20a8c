"""What a check may say: each failure names what to do about it."""

from __future__ import annotations

import ast

import pytest
from doctor_runs import FIX
from paths import ROOT


def fixes() -> dict[str, str]:
    """Return how the fix of each ``failed(text, fix)`` begins, by where it stands."""
    found = {}
    for path in sorted((ROOT / "lit_grpo" / "cli" / "doctor").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "failed":
                fix = call.args[1]
                first = fix.values[0] if isinstance(fix, ast.JoinedStr) else fix
                if isinstance(first, ast.Constant):  # else a variable, which other tests read
                    found[f"{path.stem} {call.lineno}"] = first.value
    return found


@pytest.mark.parametrize("fix", fixes().values(), ids=fixes())
def test_a_fix_begins_with_a_verb(fix):
    assert FIX.match(fix)


def test_most_failures_are_seen():
    assert len(fixes()) >= 10
