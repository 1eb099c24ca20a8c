"""Keep gold scores on disk: the votes of a judge, and answers that a program has checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from lit_grpo.cli.prepare.fingerprint import Scorer
from lit_grpo.cli.prepare.join_gold import Checked
from lit_grpo.cli.prepare.recipe import Recipe
from lit_grpo.cli.prepare.records import RecordFiles

PROGRAM = "program"


class JudgeVotes:
    """The votes of one judge, from this and other processes, as of the last `refresh`."""

    def __init__(self, directory: Path) -> None:
        self._files = RecordFiles(directory)
        self._votes: dict[str, dict[int, int]] = {}
        self.num_votes = 0
        self.spent_usd = 0.0
        """US dollars of all calls that were recorded, including failed ones."""
        self.refresh()

    def votes(self, key: str) -> Mapping[int, int]:
        """Return the grades of an answer by the number of the vote."""
        return self._votes.get(key, {})

    def all_votes(self) -> Iterable[tuple[str, Mapping[int, int]]]:
        """Return every answer that has a vote."""
        return self._votes.items()

    def add(self, key: str, vote: int, grade: int | None, cost: float) -> None:
        """Record a vote; without a grade only what the call cost."""
        self._files.append({"k": key, "v": vote, "s": grade, "c": cost})

    def refresh(self) -> None:
        """Read what was recorded since the last call.

        Raises:
            UserError: a line is damaged.
        """
        for record in self._files.read_new():
            self.spent_usd += record["c"]
            if record["s"] is not None:
                votes = self._votes.setdefault(record["k"], {})
                # Of two votes of one number, which only processes without locks leave, the first.
                self.num_votes += record["v"] not in votes
                votes.setdefault(record["v"], record["s"])

    def close(self) -> None:
        self._files.close()


class CheckedAnswers:
    """Answers to verifiable rows with the values that a program gave them."""

    def __init__(self, cache: Path) -> None:
        self._files = RecordFiles(cache / PROGRAM)
        self._found: dict[str, Checked] = {}
        self.refresh()

    def get(self, key: str) -> Checked | None:
        return self._found.get(key)

    def all_answers(self) -> Iterable[Checked]:
        """Return the answers to every row."""
        return self._found.values()

    def add(self, key: str, checked: Checked) -> None:
        self._files.append({"k": key, "answers": checked.answers, "gold": checked.gold_scores})

    def refresh(self) -> None:
        """Read what was recorded since the last call; raise UserError if a line is damaged."""
        for record in self._files.read_new():
            found = Checked(answers=tuple(record["answers"]), gold_scores=tuple(record["gold"]))
            self._found.setdefault(record["k"], found)

    def close(self) -> None:
        self._files.close()


class StoredGold:
    """The gold scores that a cache has for the rows of a recipe.

    Raises:
        UserError: it is of another judge, or damaged.
    """

    def __init__(self, cache: Path, recipe: Recipe) -> None:
        self.scored_by: dict[str, str] = {}
        """The judge and its fingerprint; empty if it scores no source of the recipe."""
        self._judged = None
        is_judged = any(source.kind == "open" for source in recipe.sources.values())
        if recipe.judge is not None and is_judged:
            scorer = Scorer.of(recipe)
            self._judged = JudgeVotes(scorer.directory(cache))
            self.scored_by = {
                "judge": recipe.judge.model,
                "template": Path(recipe.gold.template).name,
                "fingerprint": scorer.fingerprint,
            }
        self._checked = CheckedAnswers(cache)

    def votes(self, key: str) -> Mapping[int, int]:
        return {} if self._judged is None else self._judged.votes(key)

    def checked(self, key: str) -> Checked | None:
        return self._checked.get(key)
