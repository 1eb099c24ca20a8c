"""Names of keys in other libraries, and what is suggested in their place."""

import re

from paths import ROOT

from lit_grpo.types.foreign_keys import KEYS

ROW = re.compile(r"^\| (?P<ours>[^|]+) \| (?P<trl>[^|]+) \| (?P<verl>[^|]*)\|$", re.MULTILINE)
OTHERS = {"model", "cispo", "sapo", "vespo", "k3"}
"""A key that there is here, with another meaning, and values of keys."""


def test_every_setting_of_trl_in_the_guide_has_a_suggestion():
    tables = (ROOT / "docs" / "guides" / "migrate.md").read_text().partition("## Aggregations")[0]
    names = {
        name
        for row in ROW.finditer(tables)
        for name in re.findall(r"`(\w+)`", row["trl"])
        if not re.search(rf"\b{name}`", row["ours"])  # called the same
    }
    assert len(names) > 50
    assert names - OTHERS - KEYS.keys() == set()


def test_every_suggested_key_is_one_that_the_docs_have():
    known = (ROOT / "docs" / "guides" / "migrate.md").read_text()
    for ours in KEYS.values():
        for key in re.findall(r"(?:model|data|trainer)\.[\w.]+|run_dir|ckpt_path", ours):
            assert f"`{key}`" in known or key == "model.seed"
