"""Prompts that are built when a step needs them."""

import threading
from dataclasses import replace

import pytest
from prepared_data import write_prepared

from lit_grpo.data.prompts import lazy_prompts
from lit_grpo.data.prompts.lazy_prompts import LazyPrompts
from lit_grpo.data.prompts.prompt_format import PromptFormat, build_prompts
from lit_grpo.data.rows.mapped import MappedRows
from lit_grpo.data.rows.prepared import find_prepared
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.types import UserError


@pytest.fixture
def split(tmp_path):
    return find_prepared(str(write_prepared(tmp_path / "prepared", num_train=12))).split("train")


def lazy(split, **settings) -> LazyPrompts:
    form = PromptFormat(**({"require_answer": False} | settings))
    return LazyPrompts(MappedRows(split.path), byte_tokenizer(), form, "mixed")


def test_prompts_are_those_that_are_built_at_once(split):
    built = build_prompts(split.rows(), byte_tokenizer(), PromptFormat(require_answer=False))
    prompts = lazy(split)
    assert [*prompts] == [replace(one, source="mixed", row=n) for n, one in enumerate(built)]
    assert prompts[3:5] == [*prompts][3:5]
    assert [*prompts.ids()] == [one.id for one in built]


def test_one_that_is_too_long_is_none(split):
    prompts = lazy(split, max_prompt_tokens=len("What is 9 plus 10?"))
    built = [one for one in prompts if one is not None]
    assert {one.id for one in built} == {f"verifiable:{n}" for n in range(10)}
    assert len(prompts) == 24


def test_what_is_prepared_is_built_once_in_a_thread_and_the_rest_is_dropped(split, monkeypatch):
    prompts, threads = lazy(split), []

    def build(row, *arguments):
        threads.append((row.id, threading.current_thread() is threading.main_thread()))
        return original(row, *arguments)

    original = lazy_prompts.build_prompt
    monkeypatch.setattr(lazy_prompts, "build_prompt", build)
    prompts.prepare([4, 6])
    prompts.prepare([6, 8])
    assert [prompts[index].id for index in (8, 6, 2)] == [
        *("verifiable:4", "verifiable:3", "verifiable:1")
    ]
    built = [one for one in threads if one[0] != "verifiable:2"]  # may have begun before
    assert built == [("verifiable:3", False), ("verifiable:4", False), ("verifiable:1", True)]


def test_an_error_of_a_row_comes_when_its_prompt_is_asked_for(split):
    prompts = lazy(split, require_answer=True)
    prompts.prepare([1, 2])
    assert prompts[2].answer == "3"
    with pytest.raises(UserError, match=r"train.parquet, row 2"):
        prompts[1]


def test_settings_are_checked_at_once(split):
    with pytest.raises(UserError, match="tools_column must be a column of the data, got 'tool'"):
        lazy(split, tools_column="tool")
