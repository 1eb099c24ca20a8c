"""Identify the judge, template and scale of a gold score by the name of a directory.

A judge is known by its model's name and its sampling, not by its address: a server may move.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.cli.prepare.recipe import Gold, Recipe
from lit_grpo.cli.prepare.records import RecordFiles
from lit_grpo.judge import Judge
from lit_grpo.judge.reply import Form, Grade, Text
from lit_grpo.judge.template import JudgeTemplate
from lit_grpo.types import UserError

FORMAT = 1
PREFIX, FILE = "judge-", "fingerprint.json"
TEMPLATE_VARIABLES = ("question", "reference", "rubric", "highest", "items")
TEMPLATE_NEEDS = ("question", "items")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """A judge with its template and scale."""

    judge: Judge
    gold: Gold
    template: JudgeTemplate
    form: Form

    @classmethod
    def of(cls, recipe: Recipe) -> Scorer:
        """Return the fingerprint of a recipe's judge.

        Raises:
            UserError: the recipe has no judge, or its template or its votes are wrong.
        """
        gold = recipe.gold
        if recipe.judge is None:
            raise UserError(
                "open rows without gold scores need a judge, and the recipe has none. Set judge in "
                "the recipe, or columns.gold_scores of their source to the column that has scores."
            )
        recipe.judge.check_votes("gold.num_evals", gold.num_evals)
        return cls(
            judge=recipe.judge,
            gold=gold,
            template=JudgeTemplate(gold.template, TEMPLATE_VARIABLES, TEMPLATE_NEEDS),
            form=Form({"explanation": Text(), "score": Grade(gold.highest)}),
        )

    @property
    def parts(self) -> dict[str, Any]:
        """Everything that a grade depends on, except the row and the answer."""
        judge, gold = self.judge, self.gold
        return {
            "format": FORMAT,
            "model": judge.model,
            "temperature": judge.temperature,
            "extra_body": dict(judge.extra_body or {}),
            "template": self.template.text,
            "form": self.form.instructions(1),
            "highest": gold.highest,
            "answers_per_call": gold.answers_per_call,
            "show_reference": gold.show_reference,
        }

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits for `parts`."""
        text = json.dumps(self.parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def directory(self, cache: Path) -> Path:
        """Return where a cache has the votes of this judge, whether or not it has any.

        Raises:
            UserError: the cache has only votes of another judge, template or scale.
        """
        own = cache / f"{PREFIX}{self.fingerprint}"
        others = [one for one in sorted(cache.glob(f"{PREFIX}*")) if one != own and _has_vote(one)]
        if others and not _has_vote(own):
            raise UserError(
                f"{cache} must have the scores of the judge of this recipe ({self.fingerprint}), "
                f"got those of another: {'; '.join(map(self._describe, others))} (scores of two "
                "judges cannot be compared). Choose another --cache, or set judge and gold of the "
                "recipe as they were."
            )
        return own

    def write(self, directory: Path) -> None:
        """Make the directory, with a file that says whose it is."""
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / FILE).exists():
            partial = directory / f"{FILE}.{os.getpid()}"
            partial.write_text(json.dumps(self.parts, sort_keys=True, indent=1) + "\n")
            partial.replace(directory / FILE)

    def _describe(self, other: Path) -> str:
        """Return the name of another judge's directory and what differs."""
        try:
            theirs = json.loads((other / FILE).read_text())
        except (OSError, ValueError):
            return other.name
        changed = [
            _difference(name, theirs.get(name), value)
            for name, value in self.parts.items()
            if isinstance(theirs, Mapping) and theirs.get(name) != value and name != "form"
        ]
        return f"{other.name} ({', '.join(changed)})" if changed else other.name


def _has_vote(directory: Path) -> bool:
    """Return whether a judge has graded an answer; a call that failed leaves only its cost."""
    return any(one["s"] is not None for one in RecordFiles(directory).read_new())


def read_scale(directory: Path) -> int:
    """Return the best grade of a judge's directory.

    Raises:
        UserError: the file that has this is missing or damaged.
    """
    try:
        highest: int = json.loads((directory / FILE).read_text())["highest"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{directory / FILE} cannot be read: {error}. Run lit-grpo precompute again, which "
            "writes it."
        ) from error
    return highest


def _difference(name: str, theirs: Any, own: Any) -> str:
    if name == "template":
        return "another text of the template"
    return f"{name} {_shown(theirs)}, not {_shown(own)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
