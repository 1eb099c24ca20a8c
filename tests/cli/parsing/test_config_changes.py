"""Runs that are resumed, with their own settings and with others, as a user would."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml
from cli_base import BASE
from run_logs import workplace

from lit_grpo.__main__ import main
from lit_grpo.cli.parsing.config_changes import Change, find_changes
from lit_grpo.runs.files.event_log import read_events

RUN = "runs/base/0"


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Path:
    """The working directory of a run of two steps, with settings from the command line."""
    callbacks = [{"class_path": "Checkpoints", "init_args": {"dirpath": "${run_dir}/checkpoints"}}]
    config = BASE | {"trainer": BASE["trainer"] | {"callbacks": callbacks}}
    directory = tmp_path_factory.mktemp("started")
    (directory / "base.yaml").write_text(yaml.safe_dump(config))
    settings = ["--model.sampling.max_tokens=2", "--model.optimizer.lr=0.25"]
    with workplace(directory):
        assert main(["fit", "--config=base.yaml", *settings]) == 0
    return directory


@pytest.fixture
def run(here, started) -> Path:
    """A copy of that run in the working directory."""
    shutil.copytree(started, here, dirs_exist_ok=True)
    return here / RUN


def metrics_of(run: Path) -> pd.DataFrame:
    return pd.read_csv(run / "metrics.csv")


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_goes_on_with_its_own_settings(run):
    assert main(["fit", RUN, "--trainer.max_steps=4"]) == 0
    metrics = metrics_of(run)
    assert metrics["step"].tolist() == [0, 1, 2, 3]
    assert metrics["resumes"].tolist() == [0, 0, 1, 1]
    assert metrics["policy/lr"].tolist() == [0.25] * 4
    assert metrics["completions/max_length"].max() <= 2
    log = (run / "run.log").read_text()
    assert (
        f"resuming from {RUN}/checkpoints/last.ckpt after rollout step 2, optimizer step 2" in log
    )
    assert "changed for this part of the run: trainer.max_steps: 2 -> 4" in log
    assert log.count("changed for this part of the run") == 1


@pytest.mark.slow
def test_the_config_of_the_earlier_part_is_kept(run):
    for steps in (3, 4):
        assert main(["fit", RUN, f"--trainer.max_steps={steps}"]) == 0
    assert main(["fit", RUN]) == 0  # nothing differs, so nothing is kept
    configs = {path.name: yaml.safe_load(path.read_text()) for path in run.glob("*.yaml")}
    steps = {name: config["trainer"]["max_steps"] for name, config in configs.items()}
    assert steps == {"config.0.yaml": 2, "config.1.yaml": 3, "config.yaml": 4}


def test_settings_that_would_make_it_a_different_run_are_refused(run, capsys):
    before = contents(run)
    assert main(["fit", "--config=base.yaml", "--ckpt_path=last"]) == 2
    error = capsys.readouterr().err
    assert "model.sampling.max_tokens: 2 -> 3" in error
    assert "lit-grpo fit runs/base/0" in error
    assert "Other changes could be applied: " in error
    assert "model.optimizer.init_args.lr: 0.25 -> " in error
    assert contents(run) == before


def test_other_settings_of_a_new_run_from_a_checkpoint_name_the_run_of_the_checkpoint(run, capsys):
    words = ["--config=base.yaml", f"--ckpt_path={RUN}/checkpoints/last.ckpt", "--run_dir=runs/new"]
    assert main(["fit", *words]) == 2
    assert f"Go on with its own settings: lit-grpo fit {RUN}." in capsys.readouterr().err


def test_a_reward_that_is_added_is_refused(run, capsys):
    Path("added_rewards.py").write_text(
        "from lit_grpo import Reward\n\n\nclass Short(Reward):\n    score = None\n"
    )
    assert main(["fit", RUN, "--model.rewards=[MathReward, added_rewards.Short]"]) == 2
    assert "model.rewards.1: (not set) -> {'class_path'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "fit"])
def test_the_command_that_goes_on_is_the_one_that_was_used(here, command, capsys):
    settings = {"target_column": "answer"} if command == "sft" else {"rewards": ["MathReward"]}
    model = {name: BASE["model"][name] for name in ("policy", "sampling")} | settings
    Path("base.yaml").write_text(yaml.safe_dump(BASE | {"model": model}))
    words = [command, "--config=base.yaml", "--run_dir=my run", "--trainer.max_steps=1"]
    assert main(words) == 0
    assert main(words) == 2
    assert f"Resume it: lit-grpo {command} 'my run'." in capsys.readouterr().err
    assert main([command, "my run", "--seed_everything=7"]) == 2
    assert f"its own settings: lit-grpo {command} 'my run'." in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_was_moved_goes_on_where_it_is(run):
    moved = run.rename(run.parents[1] / "moved")
    assert main(["fit", "runs/moved", "--trainer.max_steps=3"]) == 0
    assert metrics_of(moved)["step"].tolist() == [0, 1, 2]
    assert sorted(path.name for path in moved.parent.iterdir()) == ["base", "moved"]
    assert not any((moved.parent / "base").iterdir())


def test_a_run_that_is_repeated_elsewhere_leaves_the_first_as_it_was(run):
    before = contents(run)
    assert main(["fit", f"--config={RUN}/config.yaml", "--run_dir=runs/again"]) == 0
    assert contents(run) == before
    assert Path("runs/again/checkpoints/last.ckpt").is_file()


def test_allowed_changes_are_applied_logged_and_not_remembered(run):
    words = ["--model.sampling.max_tokens=1", "--trainer.max_steps=3", "--allow_changes"]
    assert main(["fit", RUN, *words]) == 0
    assert metrics_of(run)["completions/max_length"].iloc[-1] == 1
    assert (run / "run.log").read_text().count("model.sampling.max_tokens: 2 -> 1") == 1
    *_, resume, _ = read_events(run)
    assert "model.sampling.max_tokens: 2 -> 1" in resume.changes
    assert yaml.safe_load((run / "config.yaml").read_text())["allow_changes"] is False


@pytest.mark.slow
def test_changes_are_said_not_to_be_applied_if_no_step_is_left(run):
    before = (run / "config.yaml").read_bytes()
    assert main(["fit", RUN, "--model.sampling.max_tokens=1", "--allow_changes"]) == 0
    log = (run / "run.log").read_text()
    assert "no step was left to take, so that no change was applied: raise trainer.max" in log
    assert (run / "config.yaml").read_bytes() == before
    assert main(["fit", RUN, "--trainer.max_steps=3"]) == 0
    assert (run / "run.log").read_text().count("no step was left") == 1
    assert main(["fit", RUN, "--trainer.max_steps=3"]) == 0
    assert "no step was left to take: raise trainer.max_steps" in (run / "run.log").read_text()


@pytest.mark.parametrize("schedule", [pytest.param("constant", marks=pytest.mark.slow), "linear"])
def test_a_new_learning_rate_is_used(run, schedule):
    words = ["--model.optimizer.lr=0.5", f"--model.lr_schedule={schedule}"]
    assert main(["fit", RUN, "--trainer.max_steps=4", *words]) == 0
    expected = [0.5, 0.5] if schedule == "constant" else [0.25, 0.125]
    assert metrics_of(run)["policy/lr"].tolist() == [0.25, 0.25, *expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "max_steps=1",
            "max_steps must be >= 2, got 1 (the checkpoint has taken 2 optimizer steps)",
        ),
        ("max_steps=0", "max_steps must be >= 2, got 0"),
        ("max_epochs=1", "max_epochs must be >= 2, got 1 (the checkpoint has taken 2 epochs)"),
    ],
)
def test_less_than_was_done_is_refused_before_the_model_is_loaded(run, setting, message, capsys):
    if "epochs" in setting:
        assert main(["fit", RUN, "--trainer.max_steps=9"]) == 0  # an epoch has 4 steps
    capsys.readouterr()
    before = contents(run)
    assert main(["fit", RUN, f"--trainer.{setting}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert contents(run) == before
    assert main(["fit", RUN]) == 0


@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_run_is_evaluated_by_its_name(run, command, capsys, caplog):
    assert main([command, RUN]) == 0
    assert f"evaluating {RUN}/checkpoints/last.ckpt" in caplog.text
    assert re.search(r"^\w+/accuracy +\d\.\d{3}$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "test"])
def test_other_held_out_rows_than_the_run_s_may_have_been_trained_on(run, command, caplog):
    warned = (
        "it may have been trained on those that are held out here, and then their accuracy is too "
        "high (data.init_args.validation_size: 2 -> 4)"
    )
    assert main([command, RUN, "--data.validation_size=4"]) == 0
    assert warned in caplog.text
    rows = '{"prompt": "1+1=", "answer": "2"}'
    Path("rows.jsonl").write_text(f"{rows}\n{rows}")
    own_rows = "--data=PromptData --data.train=rows.jsonl --data.prompts_per_step=1 "
    own_rows += "--data.validation_size=0 --data.validation=rows.jsonl"
    for words in ("--data.validation_batch_size=1 --data.seed=7", own_rows):
        caplog.clear()
        assert main([command, RUN, *words.split()]) == 0
        assert "held out other rows" not in caplog.text, words
    assert "2 of 2 held-out prompts are training prompts" in caplog.text


def test_a_run_that_is_none_is_refused(run, capsys):
    assert main(["fit", "base.yaml"]) == 2
    assert "Use --config base.yaml." in capsys.readouterr().err
    assert main(["fit", "runs/base/7"]) == 2
    assert "runs/base/7: no such run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "is_harmless"),
    [
        ("trainer.max_steps", True),
        ("trainer.callbacks.0.init_args.dirpath", True),
        ("model.optimizer.init_args.lr", True),
        ("model.optimizer.class_path", False),
        ("model.engine.init_args.urls", True),
        ("model.outage.max_absent_fraction", True),
        ("model.update.max_tokens_per_micro_batch", True),
        ("model.update.minibatches", False),
        ("model.policy.path", False),
        ("model.policy.gradient_checkpointing", True),
        ("model.sampling.temperature", False),
        ("model.rewards.0.class_path", False),
        ("model.rewards.0.init_args.timeout_seconds", True),
        ("model.rewards.1.init_args.judge.limits.max_concurrency", True),
        ("model.rewards.1.init_args.judge.model", False),
        ("data.init_args.train", False),
        ("data.init_args.validation", True),
        ("seed_everything", False),
    ],
)
def test_what_may_change_during_a_run(key, is_harmless):
    assert Change(key, 1, 2).is_harmless is is_harmless


BEFORE = "run_dir: a\nmodel: {x: 1, rewards: [{w: 1}, {w: 2}], stop: [a], gone: 3, lora: null}"
AFTER = "run_dir: b\nmodel: {x: 1, rewards: [w: 1, w: 5, w: 6], stop: [b], later: 0, lora: {r: 4}}"
FOUND = [
    "model.rewards.1.w: 2 -> 5",
    "model.rewards.2: (not set) -> {'w': 6}",
    "model.stop: ['a'] -> ['b']",
    "model.gone: 3 -> (not set)",
    "model.lora: None -> {'r': 4}",
]


@pytest.mark.parametrize(
    ("release", "added"), [("0.9.0", []), ("1.0.0", ["model.later: (not set) -> 0"])]
)
def test_what_changed_is_found_and_a_new_key_unless_a_later_release_has_added_it(release, added):
    before, after = f"# lit-grpo=={release}\n{BEFORE}", f"# lit-grpo==1.0.0\n{AFTER}"
    assert sorted(map(str, find_changes(before, after))) == sorted(FOUND + added)


def test_of_another_class_the_arguments_are_no_changes_of_their_own():
    before, after = (
        f"model: {{rewards: [{first}, {{class_path: C, init_args: {{z: {z}}}}}]}}"
        for first, z in (
            ("{class_path: A, init_args: {x: 1}}", 1),
            ("{class_path: B, init_args: {y: 1}}", 2),
        )
    )
    found = ["model.rewards.0.class_path: A -> B", "model.rewards.1.init_args.z: 1 -> 2"]
    assert [str(one) for one in find_changes(before, after)] == found


def test_a_model_named_by_its_class_is_compared_key_by_key():
    before = "model: {class_path: lit_grpo.GRPOModule, init_args: {outage: {a: 1}}}"
    after = "model: {class_path: lit_grpo.GRPOModule, init_args: {outage: {a: 2}}}"
    (change,) = find_changes(before, after)
    assert change.key == "model.outage.a"
    assert change.is_harmless


@pytest.mark.parametrize(
    ("key", "is_harmless"),
    [
        ("data.init_args.sources.open.data.init_args.validation", True),
        ("data.init_args.sources.open.data.init_args.train", False),
        ("data.init_args.sources.open.weight", False),
        ("data.init_args.curriculum", False),
        ("model.rewards.0.init_args.only_sources", False),
    ],
)
def test_only_the_validation_of_a_source_may_change_without_a_word(key, is_harmless):
    assert Change(key=key, before=1, after=2).is_harmless is is_harmless
