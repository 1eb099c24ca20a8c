"""Names of keys in other libraries, and what is suggested in their place."""

import re

from paths import ROOT

from lit_grpo.types.foreign_keys import KEYS


def test_every_suggested_key_is_one_that_the_docs_have():
    known = (ROOT / "docs" / "guides" / "migrate.md").read_text()
    for ours in KEYS.values():
        for key in re.findall(r"(?:model|data|trainer)\.[\w.]+|run_dir|ckpt_path", ours):
            assert f"`{key}`" in known or key == "model.seed"
