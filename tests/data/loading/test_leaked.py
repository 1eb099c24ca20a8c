"""Held-out prompts that are trained on as well."""

from dataclasses import replace

import pytest
from prepared_data import write_prepared
from tiny import prompt

from lit_grpo.data.loading import order
from lit_grpo.data.loading.curriculum import Curriculum, Phase
from lit_grpo.data.loading.leaked import describe_leaked
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.data.loading.mixture_loader import MixtureLoader
from lit_grpo.data.loading.order import TableOrder
from lit_grpo.data.prompts import lazy_prompts
from lit_grpo.data.prompts.lazy_prompts import LazyPrompts
from lit_grpo.data.prompts.prompt_format import PromptFormat
from lit_grpo.data.rows.mapped import MappedRows
from lit_grpo.data.rows.prepared import find_prepared
from lit_grpo.policy.byte_tokenizer import byte_tokenizer

TRAINED = [prompt(text, answer=gold) for text, gold in {"1+1=": "2", "2+2=": "4"}.items()]


@pytest.mark.parametrize(
    ("held_out", "start"),
    [
        ([], ""),
        ([prompt("3+3=", answer="6")], ""),
        ([prompt("1+1=", answer="10")], ""),
        ([prompt("1+1=", answer="2", id="elsewhere")], "1 of 1 held-out prompts"),
        ([TRAINED[0], TRAINED[0], prompt("3+3=", answer="6")], "2 of 3 held-out prompts"),
    ],
)
def test_a_prompt_with_its_gold_answer_is_known_whatever_its_id(held_out, start):
    found = describe_leaked(PromptLoader(TRAINED, 1), held_out)
    assert found.startswith(start)
    assert bool(found) == bool(start)


def test_of_mapped_rows_only_those_a_run_is_checked_with_are_built(tmp_path, monkeypatch):
    split = find_prepared(str(write_prepared(tmp_path / "prepared", num_train=12))).split("train")
    form = PromptFormat(require_answer=False)
    lazy = LazyPrompts(MappedRows(split.path), byte_tokenizer(), form)
    held_out = [replace(one, source="", row=0) for one in lazy]
    built = []

    def build(row, *arguments):
        built.append(row.id)
        return original(row, *arguments)

    original = lazy_prompts.build_prompt
    monkeypatch.setattr(lazy_prompts, "build_prompt", build)
    monkeypatch.setattr(order, "MAX_BUILT_AT_START", 4)
    whole = Curriculum(phases=(Phase(weights={"": 1.0}, fraction=1.0),))
    loader = MixtureLoader([TableOrder("", lazy, (0,))], 2, whole, lambda ahead: ahead)
    assert describe_leaked(loader, held_out).startswith("at least 4 of 24 held-out prompts")
    assert loader.some_prompts() is loader.some_prompts()
    assert len(built) == 4
