"""Run examiners that grade answers to 1+1, and read their findings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_grpo.judge import Judge
from lit_grpo.judge.examiner import Examiner
from lit_grpo.judge.template import JudgeTemplate

CONTEXT = {"question": "1+1=", "reference": "2", "highest": 10}


def grade_template(name: str | Path = "grade") -> JudgeTemplate:
    return JudgeTemplate(str(name), (*CONTEXT, "items"), ("items",))


def with_examiner(
    judge: Judge,
    scene: Callable[[Examiner], Awaitable[Any]],
    *,
    items_per_call: int = 1,
    template: str | Path = "grade",
) -> tuple[Any, Mapping[str, float]]:
    """Run a scene with an examiner; return its result and the totals of the ledger."""

    async def run() -> tuple[Any, Mapping[str, float]]:
        examiner = Examiner(
            judge=judge, template=grade_template(template), items_per_call=items_per_call
        )
        try:
            return await scene(examiner), examiner.observe().totals
        finally:
            await examiner.close()

    return asyncio.run(run())


def scores(found: Sequence[Any]) -> list[Any]:
    """Return the grades of findings; None for those without a verdict."""
    return [one.verdict and one.verdict["score"] for one in found]
