"""Names of other libraries, and what is suggested in their place."""

import re
from dataclasses import fields
from typing import get_type_hints

import pytest
import yaml
from cli_base import BASE
from paths import ROOT

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.foreign_names import FIRST_FIELD, VALUES, suggest_value
from lit_grpo.cli.parsing.type_hints import literals
from lit_grpo.objective import AdvantageConfig, KLTerm, Objective
from lit_grpo.training.optimizer.learning_rate import Schedule

DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("model.objective.surrogate", "ppo", " Did you mean clip?"),
        ("model.objective.kl.estimator", "low_var_kl", " Did you mean k3?"),
        ("objective.aggregation", "seq-mean-token-sum", " Did you mean sequence_sum?"),
        ("model.advantage.deviation", "False", " Did you mean none?"),
        (
            "model.advantage.baseline",
            "rloo",
            " Did you mean leave_one_out? The whole method: --config presets/rloo.",
        ),
        ("model.objective.kl", "mse", " Did you mean model.objective.kl.estimator: k2?"),
        ("model.objective.surrogate", "clp", ""),
        ("trainer.precision", "ppo", ""),
    ],
)
def test_a_value_of_another_library_has_its_counterpart_and_the_preset_of_its_method(
    key, value, hint
):
    assert suggest_value(key, value) == hint


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


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["--model.objective.surrogate=ppo"], "got ppo. Did you mean clip?"),
        (["--model.objective.aggregation=token-mean"], "got token-mean. Did you mean token?"),
        (
            ["--model.advantage=rloo"],
            "Did you mean model.advantage.baseline: leave_one_out? The"
            " whole method: --config presets/rloo.",
        ),
        (["--model.kl_loss_coef=0.1"], "no such key. Set model.objective.kl.coef."),
    ],
)
def test_a_name_of_another_library_is_told_its_counterpart(arguments, end, here, capsys):
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    assert main(["fit", "--config=base.yaml", *arguments]) == 2
    assert capsys.readouterr().err.rstrip("\n").endswith(end)
