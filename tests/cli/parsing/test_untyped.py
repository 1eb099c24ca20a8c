"""Arguments without a type: what is text and what is a number in YAML stays so."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import yaml
from cli_base import BASE

from lit_grpo.__main__ import main

GIVEN = {"word": "1", "number": 1, "null_by_default": "2", "text_by_default": "3", "many": ["4", 5]}
ARGUMENTS = "self, word, number, many, null_by_default=None, text_by_default='x'"
BODY = f"""
    def __init__({ARGUMENTS}):
        super().__init__()
        given = dict(word=word, number=number, null_by_default=null_by_default)
        given |= dict(text_by_default=text_by_default, many=many)
        assert given == {GIVEN!r}, given
"""
MODULE = f"""
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lit_grpo.rewards import Reward
from lit_grpo.rollout import HFEngine


class Word(Reward):
{BODY}
    async def score(self, prompt, completion):
        return 0.0


class Watch(Callback):
{BODY}

class Engine(HFEngine):
{BODY}

class Logger(CSVLogger):
{BODY.replace("__init__()", "__init__('logs')")}

def length(prompt, completion, word, many):
    assert (word, many) == ("1", ["4", 5]), (word, many)
    return 0.0
"""
FUNCTION = {"function": "own.length", "reward_kwargs": {"word": "1", "many": ["4", 5]}}


@pytest.fixture(autouse=True)
def own(add_module):
    add_module("own", MODULE)


def of(name: str) -> dict:
    return {"class_path": f"own.{name}", "init_args": copy.deepcopy(GIVEN)}


def config(here: Path) -> str:
    one = copy.deepcopy(BASE)
    one["model"] |= {"rewards": [of("Word")], "engine": of("Engine")}
    one["trainer"] |= {"callbacks": [of("Watch")], "logger": [of("Logger")], "max_steps": 1}
    (here / "own.yaml").write_text(yaml.safe_dump(one))
    return "--config=own.yaml"


def all_given(found: dict) -> list[dict]:
    trainer, model = found["trainer"], found["model"]
    nodes = [model["rewards"][0], model["engine"], trainer["callbacks"][0], trainer["logger"][0]]
    return [{key: node["init_args"][key] for key in GIVEN} for node in nodes]


def test_a_quoted_number_in_a_file_stays_text_and_a_plain_one_a_number(here, printed_config):
    assert all_given(printed_config(config(here))) == [GIVEN] * 4


def test_a_quoted_number_within_a_value_of_the_command_line_stays_text(here, printed_config):
    listed = [
        f"--model.rewards={json.dumps([of('Word')])}",
        f"--model.engine={json.dumps(of('Engine'))}",
    ]
    found = printed_config(config(here), *listed)
    for node in (found["model"]["rewards"][0], found["model"]["engine"]):
        assert {key: node["init_args"][key] for key in GIVEN} == GIVEN


def test_a_plain_word_of_the_command_line_is_read_as_yaml(here, printed_config):
    found = printed_config(config(here), "--model.engine.word=7", "--model.engine.number=8")
    assert (found["model"]["engine"]["init_args"]["word"]) == 7
    assert (found["model"]["engine"]["init_args"]["number"]) == 8


def test_arguments_of_a_function_stay_what_they_are(here, printed_config):
    reward = {"class_path": "FunctionReward", "init_args": FUNCTION}
    found = printed_config(config(here), f"--model.rewards={json.dumps([reward])}")
    assert found["model"]["rewards"][0]["init_args"]["reward_kwargs"] == FUNCTION["reward_kwargs"]


def test_a_run_saves_its_texts_and_a_resume_reads_them_again(here):
    assert main(["fit", config(here), "--run_dir=run"]) == 0
    assert all_given(yaml.safe_load((here / "run/config.yaml").read_text())) == [GIVEN] * 4
    assert main(["fit", "run", "--trainer.max_steps=2"]) == 0
    assert all_given(yaml.safe_load((here / "run/config.yaml").read_text())) == [GIVEN] * 4


EXTRA = {"a": [1, None], "b": {"c": True}}


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--model.rewards.judge.temperature=null"], "temperature", None),
        (["--model.rewards.judge.temperature", "null"], "temperature", None),
        (["--model.rewards.judge.extra_body={a: [1, null], b: {c: true}}"], "extra_body", EXTRA),
    ],
)
def test_null_for_a_key_within_a_class_is_null(words, key, value, here, capsys):
    judge = {"model": "m", "base_url": "http://localhost:1/v1"}
    rewards = [{"class_path": "JudgeReward", "init_args": {"judge": judge}}]
    config = BASE | {"model": BASE["model"] | {"rewards": rewards}}
    (here / "judge.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", "judge.yaml", *words, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["rewards"][0]["init_args"]["judge"][key] == value
