"""Values of other libraries, and what is suggested in their place."""

import re
from dataclasses import fields
from typing import get_type_hints

import pytest
from paths import ROOT

from lit_grpo.cli.parsing.type_hints import literals
from lit_grpo.objective import AdvantageConfig, KLTerm, Objective
from lit_grpo.training.optimizer.learning_rate import Schedule
from lit_grpo.types import UserError
from lit_grpo.types.foreign_values import FIRST_FIELD, VALUES

DOCS = ROOT / "docs"


def test_every_suggested_value_is_a_choice_of_its_key():
    hints = {"lr_schedule": Schedule}
    for kind in (Objective, KLTerm, AdvantageConfig):
        known = get_type_hints(kind)
        hints |= {one.name: known[one.name] for one in fields(kind)}
    for key, values in VALUES.items():
        choices = {*literals(hints[key])}
        assert {ours.split(",")[0] for ours in values.values()} <= choices
        assert choices.isdisjoint(values)
    assert {*FIRST_FIELD.values()} <= VALUES.keys()


def test_aggregations_are_those_of_the_table_in_the_docs():
    (_, table) = (DOCS / "guides" / "migrate.md").read_text().split("| `aggregation` | TRL")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (?:`([\w-]+)`|–) \|$", table, re.MULTILINE)
    assert len(rows) == 5
    names = {other: ours for ours, *others in rows for other in others if other}
    assert {name.replace("-", "_"): ours for name, ours in names.items()} == VALUES["aggregation"]


def test_a_value_of_another_library_is_told_its_counterpart_in_python():
    with pytest.raises(UserError, match=r"did you mean clip, with objective\.ratio: sequence\?"):
        Objective(surrogate="gspo")
    with pytest.raises(UserError, match=r"got False .*did you mean none\?"):
        AdvantageConfig(deviation=False)
