"""A recipe of training data: which sources, how they are filtered and split, who scores them.

Reads the YAML of a recipe, not the data that it names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from jsonargparse import ArgumentError

from lit_grpo.cli.commands import BUNDLED, RECIPES
from lit_grpo.cli.parsing.config_files import read_config
from lit_grpo.cli.parsing.parser_errors import explain
from lit_grpo.cli.parsing.strict import StrictParser
from lit_grpo.data.loading.curriculum import parse_curriculum
from lit_grpo.judge import Judge
from lit_grpo.types import UserError, check_range, setting_error
from lit_grpo.types.spelling import did_you_mean

Kind = Literal["verifiable", "open"]
Role = Literal[
    "id", "prompt", "question", "answer", "answers", "gold_scores", "completion", "rubric"
]
Verifier = str | dict[str, Any]
NAME = re.compile(r"[A-Za-z_]\w*")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RecipeSource:
    """Rows of one kind.

    Args:
        kind: ``verifiable`` if a program can tell whether an answer is right; ``open`` if only a
            judge can.
        data: File, dataset or a list of them, as in ``data.train``.
        columns: ``{role: column}`` where a column is not called like its role. ``a.b`` is a field
            of the nested column a, ``a[].b`` that field of each item of the list a.
        weight: Its share of the rows, relative to the other sources.
        where: Which rows are kept: ``{column: [lowest, highest]}``, null for no bound, or
            ``{column: value}``, or ``{column: [value, ...]}``.
        scored: Whether each row needs gold scores of its stored answers; null means that the rows
            of an open source do.
        verifier: What says whether an answer to a verifiable row is right: the name of a reward
            class, or its ``class_path`` and ``init_args``.
    """

    kind: Kind
    data: str | list[str]
    columns: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0
    where: dict[str, Any] = field(default_factory=dict)
    scored: bool | None = None
    verifier: Verifier = "MathReward"

    def __post_init__(self) -> None:
        check_range("weight", self.weight, above=0, is_finite=True)
        if not self.data:
            raise setting_error("data", "a file, a dataset or a list of them", "nothing")
        for role in self.columns:
            if role not in get_args(Role):
                raise setting_error("columns", f"of the roles {', '.join(get_args(Role))}", role)

    @property
    def files(self) -> list[str]:
        """The files and datasets of ``data``."""
        return [self.data] if isinstance(self.data, str) else list(self.data)

    @property
    def needs_gold(self) -> bool:
        """Whether a row without gold scores cannot be used."""
        return self.kind == "open" if self.scored is None else self.scored


Duplicated = Literal["drop", "report", "refuse"]


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """How to treat rows with the same prompt, within a split and between splits.

    Args:
        exact: For rows whose prompts differ in spaces and capitals at most: ``drop`` all but one,
            only ``report`` how many there are, or ``refuse`` the data.
        near: The same for prompts that share most of their words; ``ignore`` does not look for
            them, which takes long in a million rows.
        threshold: Share of common sequences of five words from which prompts are near-duplicates.
    """

    exact: Duplicated = "drop"
    near: Literal[Duplicated, "ignore"] = "report"
    threshold: float = 0.85

    def __post_init__(self) -> None:
        check_range("duplicates.threshold", self.threshold, above=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class Gold:
    """How the judge of a recipe scores the stored answers of open rows.

    Args:
        cache: Directory of the scores.
        template: Name of a bundled template, or the path of your own, as of ``JudgeReward``.
        num_evals: Independent votes on each answer; their mean is the gold score.
        highest: The best grade.
        answers_per_call: Maximum number of answers to a question in a call.
        show_reference: Whether to show the judge the gold answer, if the row has one.
    """

    cache: str = "gold"
    template: str = "grade"
    num_evals: int = 3
    highest: int = 10
    answers_per_call: int = 1
    show_reference: bool = True

    def __post_init__(self) -> None:
        for name in ("num_evals", "highest", "answers_per_call"):
            check_range(f"gold.{name}", getattr(self, name), at_least=1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How training data are made.

    Args:
        description: One line for ``lit-grpo prepare --list``.
        sources: The sources by name.
        seed: Seed of the split and the order of the rows.
        size: Rows to train on, of all sources together by their weights; null takes all.
        holdout_size: Prompts that are never trained on.
        validation_size: Number, or fraction of the prompts that are not held out, for validation.
        duplicates: What is done about rows with the same prompt.
        curriculum: Phases of training for two sources called verifiable and open, each
            ``verifiable:open:fraction`` with their weights and its fraction of the run, and
            ``:lr_scale`` for the learning rate; null trains on all sources throughout.
        judge: The judge of open rows; null if their gold scores are in the data.
        gold: How the judge scores.
    """

    description: str
    sources: dict[str, RecipeSource]
    seed: int = 0
    size: int | None = None
    holdout_size: int = 0
    validation_size: int | float = 0
    duplicates: Duplicates = Duplicates()
    curriculum: str | None = None
    judge: Judge | None = None
    gold: Gold = Gold()

    def __post_init__(self) -> None:
        if not self.sources:
            raise setting_error("sources", "one source or more", "none")
        for name in self.sources:
            if not NAME.fullmatch(name):
                why = "metrics of a training run are called after it"
                raise setting_error("sources", "called by letters, digits and _", repr(name), why)
        for key in ("seed", "holdout_size", "validation_size"):
            check_range(key, getattr(self, key), at_least=0)
        if isinstance(self.validation_size, float) and self.validation_size >= 1:
            rule = "a whole number, or a fraction below 1"
            raise setting_error("validation_size", rule, self.validation_size)
        check_range("size", self.size, at_least=1)
        weights = {name: source.weight for name, source in self.sources.items()}
        parse_curriculum(self.curriculum, weights, "curriculum")

    def share(self, name: str) -> float:
        """Return the share of a source in the rows by its weight."""
        return self.sources[name].weight / sum(one.weight for one in self.sources.values())

    def with_data(self, data: Mapping[str, list[str]]) -> Recipe:
        """Return the same recipe with other files or datasets for some of its sources.

        Raises:
            UserError: it has no such source.
        """
        for name in data:
            if name not in self.sources:
                hint = did_you_mean(name, self.sources) or f" Known: {', '.join(self.sources)}."
                raise UserError(f"--data {name}=…: the recipe has no such source.{hint}")
        changed = {name: replace(self.sources[name], data=files) for name, files in data.items()}
        return replace(self, sources=self.sources | changed)


def known_recipes() -> dict[str, Path]:
    """Return the recipes by name: those that ship, and those in ``configs/data``, which win."""
    own = Path("configs") / RECIPES
    paths = [*sorted((BUNDLED / RECIPES).glob("*.yaml")), *sorted(own.glob("*.yaml"))]
    return {path.stem: path for path in paths}


def is_shipped(name: str) -> bool:
    """Return whether `read_recipe` finds a recipe that ships under a name."""
    path = known_recipes().get(name)
    return not Path(name).is_file() and path is not None and BUNDLED in path.parents


def read_recipe(name: str, data: Sequence[str] = ()) -> Recipe:
    """Read a file, or a recipe by its name.

    Args:
        name: Path of a file, or a name of `known_recipes`.
        data: What replaces the data of a source, each as ``SOURCE=FILE`` or ``SOURCE=FILE,FILE``.

    Raises:
        UserError: there is no such recipe, or it is wrong; the message names the file and the key.
    """
    known = known_recipes()
    path = Path(name) if Path(name).is_file() else known.get(name)
    if path is None and Path(name).is_dir():
        raise UserError(f"{name} is a directory, but a recipe is a file.")
    if path is None:
        file = Path(f"{name}.yaml")
        hint = f" Did you mean {file}?" if file.is_file() else did_you_mean(name, known)
        raise UserError(f"{name}: no such recipe.{hint} Known: {', '.join(known)}.")
    return _parse(read_config(path), path).with_data(dict(map(_read_replacement, data)))


def _read_replacement(text: str) -> tuple[str, list[str]]:
    name, equals, files = text.partition("=")
    if not (name and equals and files):
        raise UserError(f"data must be SOURCE=FILE or SOURCE=FILE,FILE, got {text}. Set --data.")
    return name, files.split(",")


def _parse(config: dict[str, Any], path: Path) -> Recipe:
    """Return the recipe of a mapping; nested classes are parsed alone, for the sake of errors."""
    sources = config.get("sources")
    if not isinstance(sources, Mapping):
        raise UserError(f"{path}: sources must be a mapping of names to sources, got {sources}.")
    own: dict[str, Any] = {
        "sources": {
            str(name): _build(RecipeSource, values, f"{path}: sources.{name}")
            for name, values in sources.items()
        }
    }
    if config.get("judge") is not None:
        own["judge"] = _build(Judge, config["judge"], f"{path}: judge")
    return _build(Recipe, {key: config[key] for key in config if key not in own}, str(path), **own)


def _build(kind: type[T], values: Any, where: str, **built: Any) -> T:
    """Return an object of a class from its keys and from values that are objects already."""
    parser = StrictParser(exit_on_error=False)
    parser.add_class_arguments(kind, skip=set(built))
    try:
        if not isinstance(values, Mapping):
            raise UserError(f"expected keys under it, got {values}.")
        config = parser.instantiate(parser.parse_object(dict(values)))
        return kind(**vars(config), **built)
    except ArgumentError as error:
        message = explain(parser, str(error), error.__cause__)
        raise UserError(f"{where}: {message}") from error
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
