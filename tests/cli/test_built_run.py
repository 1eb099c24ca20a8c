"""The run that commands look at: what of it can be read, and which rewards may be started."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from cli_base import BASE
from code_rewards import NeedsKey, RecordsHooks
from doctor_runs import read_run, rewarded, write_rows
from lightning import LightningModule

from lit_grpo.cli.built_run import BuiltRun, NotChecked, ReadOnce, is_ours, own_reward, suite_of
from lit_grpo.rewards import LengthReward, MathReward, ProcessReward
from lit_grpo.types import UserError


@pytest.fixture(autouse=True)
def here(here) -> Path:
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    return here


def test_what_is_read_once_is_the_same_for_all_checks():
    numbers = iter([1, 2])
    once = ReadOnce("the number", lambda: next(numbers))
    assert (once.read(), once.get(), once.or_none()) == (1, 1, 1)


def test_what_cannot_be_read_is_an_error_for_its_own_check_only():
    calls = []

    def fail():
        calls.append(1)
        raise UserError("it is not there.")

    once = ReadOnce("the model", fail)
    for _ in range(2):
        with pytest.raises(UserError, match="it is not there"):
            once.read()
    with pytest.raises(NotChecked, match="Not checked, since the model could not be read"):
        once.get()
    assert once.or_none() is None
    assert len(calls) == 1


def test_prompts_are_those_of_the_training_and_of_its_validation():
    run = read_run()
    assert (len(run.prompts), len(run.val_prompts)) == (8, 2)
    assert run.prompt_lengths == sorted(run.prompt_lengths, reverse=True)
    assert run.prompt_lengths[0] == max(len(one.token_ids) for one in run.prompts)
    assert (run.completion_tokens, run.positions) == (3, 128)
    assert read_run("--trainer.limit_val_batches=0").val_prompts == []


@pytest.mark.parametrize(
    ("arguments", "settings", "length"),
    [
        ([], {}, 128 - 3),
        ([], {"max_prompt_tokens": 64}, 64),
        (["--model.sampling.max_tokens=200"], {}, 512),
    ],
)
def test_without_data_prompts_are_as_long_as_a_setting_or_the_model_allows(
    arguments, settings, length, here
):
    words = write_rows({"prompt": "1+1="}, **settings)
    (here / "rows.jsonl").write_text("{broken\n")
    run = read_run(*words, *arguments)
    assert run.prompts == []
    assert run.prompt_lengths == [length]


def test_a_warm_up_has_the_longest_target_and_no_rewards(here):
    model = {"policy": BASE["model"]["policy"]}
    (here / "base.yaml").write_text(yaml.safe_dump(BASE | {"model": model}))
    run = read_run(*write_rows(*({"prompt": "?", "answer": "x" * n} for n in (2, 5))))
    assert run.grpo is None
    assert run.completion_tokens == 5 + 1  # the end of the sequence
    assert len(run.rewards) == 1  # that of the accuracy


@pytest.mark.parametrize("is_offline", [False, True])
def test_offline_only_rewards_of_this_package_may_be_started(is_offline):
    run = read_run(*["--offline"] * is_offline)
    assert run.may_start(MathReward())
    short = LengthReward(start_tokens=1, end_tokens=9)
    assert run.may_start(ProcessReward(short, num_workers=1))
    assert run.may_start(NeedsKey()) != is_offline
    assert run.may_start(ProcessReward(NeedsKey(), num_workers=1)) != is_offline


@pytest.mark.parametrize(
    ("class_path", "is_started"),
    [("code_rewards.NeedsKey", True), ("code_rewards.IsAsync", False), ("MathReward", False)],
)
def test_a_reward_is_started_by_a_check_if_its_start_is_the_user_s(class_path, is_started):
    run = read_run(rewarded(class_path))
    assert len(run.started) == is_started


def test_a_start_is_tried_once_and_closed():
    run = read_run(rewarded("code_rewards.RecordsHooks", file="hooks.txt"))
    (reward,) = run.started
    assert run.start_of(reward).read()
    assert run.start_of(reward).or_none()
    hooks = [line.split()[0] for line in Path("hooks.txt").read_text().splitlines()]
    assert hooks == ["start", "close"]


def test_a_reward_alone_has_the_whole_weight(tmp_path):
    reward = RecordsHooks(str(tmp_path / "hooks.txt"), weight=0.25)
    (alone,) = suite_of(reward).rewards
    assert (alone.weight, reward.weight) == (1.0, 0.25)


def test_a_wrapped_reward_is_the_one_within():
    reward = NeedsKey()
    assert own_reward(ProcessReward(reward, num_workers=1)) is reward
    assert own_reward(reward) is reward
    assert (is_ours(MathReward()), is_ours(reward)) == (True, False)


@pytest.mark.parametrize("words", [[], ["--trainer.enable_checkpointing=false"]])
def test_checkpoints_are_those_of_the_trainer_unless_they_are_off(words):
    assert (read_run(*words).checkpoints is None) == bool(words)


def test_a_model_of_another_kind_is_refused():
    command_line = SimpleNamespace(model=LightningModule())
    with pytest.raises(UserError, match="a model that trains a policy, got LightningModule"):
        BuiltRun(command_line)


def test_a_judge_of_the_accuracy_is_one_of_the_judges():
    judge = {"model": "m", "base_url": "http://127.0.0.1:1/v1", "auth": "none"}
    accuracy = {"class_path": "JudgeReward", "init_args": {"judge": judge}}
    run = read_run(f"--model.evaluation.accuracy={json.dumps(accuracy)}")
    assert [type(one).__name__ for one in run.judged] == ["JudgeReward"]
    assert len(run.rewards) == 2
