"""Environment variables that override the config, through the commands themselves."""

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import Namespace
from judge_server import JudgeServer, judges
from tiny import LLAMA

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.environment import override

REWARD = "lit_grpo.rewards.judged.alignment.RubricAlignmentReward"
DATA = "lit_grpo.data.rubric.RubricData"
ROW = {"question": "Why?", "answers": ["good one", "fair", "poor"], "gold_scores": [1.0, 0.5, 0.0]}

MINE = f"""
from {REWARD.rpartition(".")[0]} import RubricAlignmentReward
from lit_grpo.judge import Judge
from lit_grpo.rewards import Reward

class Stricter(RubricAlignmentReward):
    pass

class Fixed(RubricAlignmentReward):
    def __init__(self, judge: Judge):
        super().__init__(judge, lambda_info=0.5)

class Colour(Reward):
    overridden_by_environment = {{"colour": "MY_COLOUR"}}

    def __init__(self, colour: str | None = None, **settings):
        super().__init__(**settings)
        self.colour = colour

    def score(self, prompt, completion):
        return 0.0
"""


def config(url: str) -> dict:
    judge = {"model": "m", "auth": "none", "base_url": f"{url}/v1"}
    return {
        "trainer": {"accelerator": "cpu", "max_steps": 1, "enable_progress_bar": False},
        "model": {
            "policy": {"architecture": LLAMA | {"max_position_embeddings": 1024}},
            "rewards": [
                {"class_path": REWARD, "init_args": {"judge": judge, "lambda_info": 0.3}},
                {"class_path": "FormatReward", "init_args": {"pattern": "[a-z]", "weight": 0.0}},
            ],
            "group_size": 2,
            "sampling": {"max_tokens": 3},
            "evaluation": {"before_training": False},
        },
        "data": {"class_path": DATA, "init_args": {"train": "rows.jsonl", "prompts_per_step": 1}},
    }


@pytest.fixture(autouse=True)
def here(here, add_module) -> Path:
    (here / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 2)
    (here / "my.yaml").write_text(yaml.safe_dump(config("http://127.0.0.1:9")))
    add_module("mine", MINE)
    return here


def coefficients(config: dict, place: int = 0) -> dict:
    arguments = config["model"]["rewards"][place]["init_args"]
    return {name: arguments[name] for name in ("lambda_len", "lambda_info", "lambda_defense")}


def test_a_variable_overrides_the_file_and_the_defaults(here, printed_config, monkeypatch):
    given = {"lambda_len": 0.1, "lambda_info": 0.3, "lambda_defense": 0.2}
    assert coefficients(printed_config("--config=my.yaml")) == given
    monkeypatch.setenv("REWARD_LAMBDA_INFO", "0.0")
    monkeypatch.setenv("REWARD_LAMBDA_LEN", "1e-3")
    monkeypatch.setenv("REWARD_LAMBDA_DEFENSE", "2")
    expected = {"lambda_len": 0.001, "lambda_info": 0.0, "lambda_defense": 2.0}
    assert coefficients(printed_config("--config=my.yaml")) == expected


def test_a_variable_overrides_the_command_line(here, printed_config, monkeypatch):
    monkeypatch.setenv("REWARD_USE_CONTRASTIVE", "true")
    found = printed_config("--config=my.yaml", "--data.use_contrastive=false")
    assert found["data"]["init_args"]["use_contrastive"] is True


def test_it_applies_to_subclasses_everywhere_but_to_no_other_class(
    here, printed_config, monkeypatch
):
    judge = {"model": "m", "auth": "none"}
    more = {"class_path": "mine.Stricter", "init_args": {"judge": judge, "name": "strict"}}
    colour = {"class_path": "mine.Colour", "init_args": {"colour": "red"}}
    wrapped = {
        "class_path": "lit_grpo.rewards.workers.reward.ProcessReward",
        "init_args": {"reward": colour},
    }
    (here / "more.yaml").write_text(yaml.safe_dump({"model": {"rewards+": [more, wrapped]}}))
    monkeypatch.setenv("REWARD_LAMBDA_INFO", "0.7")
    monkeypatch.setenv("MY_COLOUR", "blue")
    found = printed_config("--config=my.yaml", "--config=more.yaml")
    assert coefficients(found, 0)["lambda_info"] == 0.7
    assert coefficients(found, 2)["lambda_info"] == 0.7
    inner = found["model"]["rewards"][3]["init_args"]["reward"]
    assert inner["init_args"]["colour"] == "blue"
    assert found["model"]["rewards"][1]["init_args"]["weight"] == 0.0


def test_a_subclass_without_the_argument_keeps_its_own(here, printed_config, monkeypatch):
    fixed = {"class_path": "mine.Fixed", "init_args": {"judge": {"model": "m"}}}
    (here / "fixed.yaml").write_text(yaml.safe_dump({"model": {"rewards+": [fixed]}}))
    monkeypatch.setenv("REWARD_LAMBDA_INFO", "0.7")
    found = printed_config("--config=my.yaml", "--config=fixed.yaml")
    assert "lambda_info" not in found["model"]["rewards"][2]["init_args"]
    assert coefficients(found, 0)["lambda_info"] == 0.7


def test_values_are_read_as_on_the_command_line(monkeypatch):
    node = Namespace(class_path=DATA, init_args=Namespace(use_contrastive=False))
    for text, value in {"True": True, "false": False}.items():
        monkeypatch.setenv("REWARD_USE_CONTRASTIVE", text)
        override(Namespace(data=node))
        assert node.init_args.use_contrastive is value


@pytest.mark.parametrize(
    ("variable", "text", "why"),
    [
        (
            "REWARD_LAMBDA_INFO",
            "much",
            "must be float, got 'much' .*rewards.0.init_args.lambda_info",
        ),
        ("REWARD_LAMBDA_INFO", "", "must be float, got ''"),
        ("REWARD_USE_CONTRASTIVE", "7", "must be bool, got '7' .*data.init_args.use_contrastive"),
        ("REWARD_LAMBDA_LEN", "-1", "lambda_len must be >= 0.*REWARD_LAMBDA_LEN where it is set"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_variable(
    here, capsys, monkeypatch, variable, text, why
):
    monkeypatch.setenv(variable, text)
    assert main(["fit", "--config=my.yaml"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert variable in line
    assert re.search(why, line), line
    assert not (here / "runs").exists()


def grade(request, answer):
    return {"score": {"good one": 9, "fair": 5, "poor": 1}[answer.text]}


def test_a_run_saves_the_values_of_variables_and_resumes_without_them(here, monkeypatch, capsys):
    with JudgeServer(judges("answer", grade)) as server:
        (here / "my.yaml").write_text(yaml.safe_dump(config(server.url)))
        monkeypatch.setenv("REWARD_LAMBDA_INFO", "0.0")
        monkeypatch.setenv("REWARD_USE_CONTRASTIVE", "true")
        monkeypatch.setenv("REWARD_LAMBDA_INF0", "1")
        assert main(["fit", "--config=my.yaml", "--run_dir=run"]) == 0
        saved = yaml.safe_load((here / "run/config.yaml").read_text())
        for variable in ("REWARD_LAMBDA_INFO", "REWARD_USE_CONTRASTIVE", "REWARD_LAMBDA_INF0"):
            monkeypatch.delenv(variable)
        again = ["--config=run/config.yaml", "--ckpt_path=last", "--trainer.max_steps=2"]
        assert main(["fit", *again]) == 0
    resumed = yaml.safe_load((here / "run/config.yaml").read_text())
    assert coefficients(saved)["lambda_info"] == coefficients(resumed)["lambda_info"] == 0.0
    assert saved["data"] == resumed["data"]
    assert saved["data"]["init_args"]["use_contrastive"] is True
    log = (here / "run/run.log").read_text()
    place = "model.rewards.0.init_args.lambda_info"
    assert log.count(f"REWARD_LAMBDA_INFO=0.0 overrides {place}: 0.3") == 1
    assert log.count("REWARD_USE_CONTRASTIVE=True overrides data.init_args.use_contrastive") == 1
    assert log.count("REWARD_LAMBDA_INF0 is set, but nothing in the config reads it") == 1
    table = (here / "run/metrics.csv").read_text()
    assert "reward/rubric_alignment/correlation" in table.splitlines()[0]
