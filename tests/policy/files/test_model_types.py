"""What is said of an architecture that `transformers` does not have, in one short line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from run_logs import workplace
from tiny import tiny_policy
from transformers import __version__

from lit_grpo.__main__ import main
from lit_grpo.policy import Policy

ADVICE = (
    "Correct it in its config.json if it is mistyped; a model that is newer than this transformers "
    "needs a newer one (pip install --upgrade transformers). Set model.policy.path to"
)


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: one for key, one in values.items() if one is not None}))


@pytest.fixture
def model(tmp_path) -> Path:
    tiny_policy().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("has_tokenizer_class", [True, False])
@pytest.mark.parametrize(
    ("model_type", "hint"), [("lama", " Did you mean llama?"), ("of_next_year", "")]
)
def test_of_an_unknown_one_the_nearest_and_what_to_do_are_said(
    model_type, hint, has_tokenizer_class, model, capsys
):
    edit(model / "config.json", model_type=model_type)
    if not has_tokenizer_class:  # the tokenizer is then chosen by the architecture
        edit(model / "tokenizer_config.json", tokenizer_class=None)
    policy = {"path": str(model)}
    with workplace(model.parent):
        base = BASE | {"model": BASE["model"] | {"policy": policy}}
        Path("base.yaml").write_text(yaml.safe_dump(base))
        assert main(["fit", "--config=base.yaml"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"transformers {__version__} has no model_type {model_type!r}.{hint} {ADVICE}" in said
    assert len(said) < 600


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("vit", r"has no causal language model for the model_type 'vit'\. Set model\.policy\.path"),
        (None, r"model_type"),
    ],
)
def test_one_without_a_language_model_is_named(model_type, why, model):
    edit(model / "config.json", model_type=model_type)
    with pytest.raises(ValueError, match=why) as raised:
        Policy(path=str(model)).load(with_reference=False)
    assert len(str(raised.value)) < 600


def test_of_a_mistyped_architecture_of_random_weights_the_nearest_is_said(capsys):
    with pytest.raises(ValueError, match=r"has no model_type 'lama'\. Did you mean llama\?") as one:
        Policy(architecture={"model_type": "lama"}).load(with_reference=False)
    assert "Correct it in model.policy.architecture" in str(one.value)
    assert len(str(one.value)) < 600
