"""Commands on real, tiny runs; in processes of their own where the end of the process matters."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from processes import LIT_GRPO, run_program, running
from run_logs import workplace

from lit_grpo.__main__ import main

FIT = [*LIT_GRPO, "fit", "--config=base.yaml"]
MINE = """
import os, signal, time
from lightning.pytorch import Callback
from lit_grpo.stopping import stop_run
from lit_grpo.rewards import Reward
from lit_grpo.training.grpo import GRPOModule
from lit_grpo.types import StopReason

class Buggy(GRPOModule):
    def training_step(self, prompts, batch_idx):
        raise ValueError("shapes do not match")
        return super().training_step(prompts, batch_idx)

class Marked(Reward):
    def __init__(self, mark: str = "", **settings):
        super().__init__(**settings)

class Unmade(GRPOModule):
    def __init__(self, policy, sampling, rewards, group_size):
        self.rewards = rewards

class Interrupted(GRPOModule):
    def training_step(self, prompts, batch_idx):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
        return super().training_step(prompts, batch_idx)

class Slow(GRPOModule):
    def training_step(self, prompts, batch_idx):
        print("training", flush=True)
        time.sleep(600)
        return super().training_step(prompts, batch_idx)

class Leaves(Callback):
    def on_train_batch_end(self, *args):
        raise SystemExit(3)

class Exhausted(Callback):
    def on_train_batch_start(self, *args):
        next(iter([]))

class Stop(Callback):
    def on_train_batch_end(self, trainer, *args):
        stop_run(trainer, StopReason(exit_code=42, message="nothing to learn."))
"""


def write_configs(directory: Path) -> None:
    (directory / "base.yaml").write_text(yaml.safe_dump(BASE))
    (directory / "mine.py").write_text(MINE)


@pytest.fixture(autouse=True)
def here(here, monkeypatch) -> Path:
    write_configs(here)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return here


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    write_configs(directory)
    with workplace(directory):
        assert main(["fit", "--config", "base.yaml", "--trainer.logger=false"]) == 0
    return directory / "runs" / "base" / "0"


@pytest.fixture
def trained(run_dir, monkeypatch) -> Path:
    monkeypatch.chdir(run_dir.parents[2])
    return run_dir


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Leaves", "Leaves.on_train_batch_end left by sys.exit(3), without a checkpoint. To stop"),
        ("Exhausted", "StopIteration in Exhausted.on_train_batch_start: an iterator has no"),
    ],
)
def test_a_callback_that_leaves_or_stops_iterating_ends_the_run_with_its_place(name, said, capsys):
    assert main(["fit", "--config=base.yaml", f"--trainer.callbacks+=mine.{name}"]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "mine.py" in error


def test_a_file_of_rewards_that_leaves_when_it_is_imported_is_named(here, capsys):
    (here / "leaves.py").write_text("def score(completions):\n    ...\n\nimport sys\nsys.exit()\n")
    for command in ("fit", "doctor"):
        assert main([command, "--config=base.yaml", "--model.rewards=[leaves.score]"]) == 1
        error = capsys.readouterr().err
        assert "your code (leaves.py, line 5) called sys.exit(None)" in error


def files_in(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def steps_in(run_dir: Path) -> list[str]:
    lines = (run_dir / "metrics.csv").read_text().splitlines()
    return [line.split(",")[0] for line in lines[1:]]


def test_a_run_writes_its_files_whatever_the_config_lists(trained):
    assert steps_in(trained) == ["0", "1"]
    assert len(list(trained.glob("completions/*.parquet"))) == 2
    checkpoints = [path.name for path in trained.glob("checkpoints/*.ckpt")]
    assert sorted(checkpoints) == ["last.ckpt", "step_000002.ckpt"]
    assert (trained / "final" / "model.safetensors").is_file()
    assert "run directory: runs/base/0" in (trained / "run.log").read_text()


def test_the_saved_config_is_complete_and_reproduces_itself(trained, printed_config):
    saved = yaml.safe_load((trained / "config.yaml").read_text())
    assert saved["run_dir"] == "runs/base/0"
    assert saved["model"]["objective"]["surrogate"] == "clip"
    assert printed_config("--config=runs/base/0/config.yaml") == saved


def test_a_new_run_in_the_directory_of_another_is_refused_and_changes_nothing(trained, capsys):
    before = files_in(trained)
    assert main(["fit", "--config=runs/base/0/config.yaml"]) == 2
    assert "runs/base/0 already holds a run" in capsys.readouterr().err
    assert files_in(trained) == before


@pytest.mark.parametrize("command", ["validate", "test"])
def test_evaluating_prints_the_accuracy_and_writes_nothing(command, trained, capsys):
    before = files_in(trained.parents[2])
    arguments = ["--config=runs/base/0/config.yaml", "--ckpt_path=last"]
    assert main([command, *arguments]) == 0
    prefix = "test" if command == "test" else "val"
    assert f"{prefix}/accuracy" in capsys.readouterr().out
    assert files_in(trained.parents[2]) == before


def test_evaluating_says_which_model_it_evaluates(trained, caplog):
    def evaluated(*arguments: str) -> str:
        caplog.clear()
        assert main(["test", "--config=runs/base/0/config.yaml", *arguments]) == 0
        return next(one for one in caplog.messages if one.startswith("evaluating"))

    given = ["--model.policy.path=runs/base/0/final", "--model.policy.architecture=null"]
    assert evaluated(*given) == (
        "evaluating runs/base/0/final, since no checkpoint was given (--ckpt_path)"
    )
    assert evaluated().startswith("evaluating random weights (model.policy.architecture)")
    assert "checkpoints/last.ckpt" in evaluated("--ckpt_path=last")


def test_a_report_of_a_run_draws_its_curves(trained, capsys):
    assert main(["report", "runs/base/0"]) == 0
    assert (trained / "curves.png").is_file()
    assert main(["report", "runs/base/9"]) == 2
    assert capsys.readouterr().err.startswith("error: runs/base/9: no such run directory.")


def test_ckpt_path_last_resumes_the_latest_run_in_its_directory(trained):
    arguments = ["--config=base.yaml", "--ckpt_path=last", "--trainer.max_steps=3"]
    assert main(["fit", *arguments]) == 0
    assert steps_in(trained) == ["0", "1", "2"]
    assert yaml.safe_load((trained / "config.yaml").read_text())["ckpt_path"] is None


def test_runs_are_numbered_and_a_failed_start_leaves_no_directory(here, printed_config):
    assert printed_config("--config=base.yaml")["run_dir"] == "runs/base/0"
    assert main(["fit", "--config=base.yaml", "--model.group_size=1"]) == 2
    assert not (here / "runs").exists()
    (here / "runs" / "base" / "4").mkdir(parents=True)
    assert printed_config("--config=base.yaml")["run_dir"] == "runs/base/5"


def test_a_run_that_fails_before_its_first_step_leaves_no_directory(here, capsys):
    (here / "nowhere").mkdir()
    policy = "--model.policy={path: nowhere, architecture: null}"
    assert main(["fit", "--config=base.yaml", policy]) == 2
    assert "could be loaded from 'nowhere'" in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_an_interval_that_the_data_cannot_have_is_one_line_and_leaves_no_directory(here, capsys):
    words = ["--trainer.val_check_interval=100", "--trainer.max_steps=300"]
    assert main(["fit", "--config=base.yaml", *words]) == 2
    error = capsys.readouterr().err
    assert "trainer.val_check_interval must be at most 4, got 100" in error
    assert "Traceback" not in error
    assert not Path("runs").exists()


ACROSS = "--trainer.check_val_every_n_epoch=null"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0.5", ACROSS], "got 0.5 (with check_val_every_n_epoch: null it counts steps, across"),
        (["0", ACROSS], "must be a whole number >= 1, or a time as 'DD:HH:MM:SS', got 0 ("),
        (["0"], "got 0 (a whole number counts the steps in an epoch, and 0.5 is half an epoch)"),
        (["0.0"], "a fraction above 0 and up to 1.0, or a time as 'DD:HH:MM:SS', got 0.0 ("),
        (["-1"], ", got -1 ("),
        (["1.5"], ", got 1.5 ("),
        ([".nan"], ", got nan ("),
        (["1", "--trainer.check_val_every_n_epoch=0"], "check_val_every_n_epoch must be >= 1"),
    ],
)
def test_an_interval_that_cannot_be_is_told_what_it_counts(words, message, capsys):
    interval = f"--trainer.val_check_interval={words[0]}"
    assert main(["fit", "--config=base.yaml", interval, *words[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: trainer.")
    assert message in error
    assert not Path("runs").exists()


@pytest.mark.parametrize("interval", ["0.5", "1.0", "2", "00:00:00:01"])
def test_an_interval_that_can_be_is_taken(interval):
    assert main(["fit", "--config=base.yaml", f"--trainer.val_check_interval={interval}"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["max_steps=2"], r"after step 2 \(trainer.max_steps: 2\), and .* come after step 4 \("),
        (["max_steps=4"], None),
        (["max_steps=5", "check_val_every_n_epoch=2"], r"step 8 \(trainer.check_.*_epoch: 2, "),
        (["max_steps=2", "val_check_interval=2"], None),
        (["max_steps=6", "val_check_interval=7", ACROSS], r"null, trainer.val_check_interval: 7\)"),
        (["max_steps=6", "val_check_interval=6", ACROSS], None),
        (["max_steps=2", "limit_val_batches=0"], None),
    ],
)
def test_a_run_that_will_never_validate_warns_once_at_its_start(words, warned, here):
    arguments = [one if one.startswith("-") else f"--trainer.{one}" for one in words]
    assert main(["fit", "--config=base.yaml", "--run_dir=run", *arguments]) == 0
    said = warnings_of(here / "run")
    assert len(said) == (warned is not None)
    assert all(re.search(str(warned), one) for one in said), said
    has_accuracy = "val/accuracy" in (here / "run" / "metrics.csv").read_text()
    assert has_accuracy == (not said and "limit_val_batches=0" not in words)


def warnings_of(run_dir: Path) -> list[str]:
    lines = (run_dir / "run.log").read_text().splitlines()
    return [one for one in lines if "no validation will run" in one]


def test_the_accuracy_before_training_does_not_wait_for_an_epoch_with_a_validation(here):
    words = ["--trainer.check_val_every_n_epoch=2", "--model.evaluation.before_training=true"]
    assert main(["fit", "--config=base.yaml", "--run_dir=run", *words]) == 0
    assert "before training: val/accuracy" in (here / "run" / "run.log").read_text()


@pytest.mark.slow
def test_several_updates_per_rollout_step_make_a_run_of_fewer_steps(here):
    words = ["--trainer.max_steps=6", "--model.update.minibatches=2", ACROSS]
    for interval, is_warned in ((3, False), (4, True)):
        every = [f"--trainer.val_check_interval={interval}", f"--run_dir=run{interval}"]
        assert main(["fit", "--config=base.yaml", *words, *every]) == 0
        assert bool(warnings_of(here / f"run{interval}")) is is_warned


def test_a_callback_that_stops_a_run_gives_its_reason_and_its_exit_code(here):
    assert main(["fit", "--config=base.yaml", "--trainer.callbacks=mine.Stop"]) == 42
    run = here / "runs" / "base" / "0"
    reason, advice = (run / "run.log").read_text().splitlines()[-2:]
    assert reason.endswith("nothing to learn.")
    assert advice.endswith("Resume after 1 step with: lit-grpo fit runs/base/0")
    assert steps_in(run) == ["0"]


def test_a_bug_shows_its_traceback_on_the_terminal_and_in_the_log(here, capsys):
    assert main(["fit", "--config=base.yaml", "--model.class_path=mine.Buggy"]) == 1
    for text in (capsys.readouterr().err, (here / "runs/base/0/run.log").read_text()):
        assert "Traceback" in text
        assert "ValueError: shapes do not match" in text


def test_a_trainer_without_logging_is_refused_and_a_null_text_is_told_its_default(here, capfd):
    assert main(["fit", "--config=base.yaml", "--trainer.barebones=true"]) == 2
    assert "trainer.barebones must be false, got True" in capfd.readouterr().err
    mark = "--model.rewards=[{class_path: mine.Marked, init_args: {mark: null}}]"
    assert main(["fit", "--config=base.yaml", mark]) == 2
    assert 'got null. Remove it for the default, or write it: "".' in capfd.readouterr().err
    assert main(["fit", "--config=base.yaml", "--model.policy.packing=null"]) == 2
    assert "or write it: true." in capfd.readouterr().err


def test_a_module_that_leaves_out_its_constructor_is_one_line_and_leaves_no_directory(
    here, capfd, recwarn
):
    model = {name: one for name, one in BASE["model"].items() if name != "evaluation"}
    (here / "one.yaml").write_text(yaml.safe_dump({**BASE, "model": model}))
    assert main(["fit", "--config=one.yaml", "--model=mine.Unmade"]) == 2
    assert capfd.readouterr().err.startswith("error: Unmade.__init__ must call super().__init__")
    assert not [one for one in recwarn if "round-trip" in str(one.message)]
    assert not (here / "runs").exists()


def test_an_error_in_the_data_is_one_line_on_the_terminal_and_a_traceback_in_the_log(here, capsys):
    (here / "bad.jsonl").write_text("{broken\n")
    (here / "more.yaml").write_text("data: {class_path: PromptData, init_args: {train: bad.jsonl}}")
    assert main(["fit", "--config=base.yaml", "--config=more.yaml", "--run_dir=run"]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("error: ")
    assert "bad.jsonl" in last_line
    assert "Traceback" in (here / "run" / "run.log").read_text()


WITHOUT_CHECKPOINTS = "--trainer.enable_checkpointing=false"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_training_without_checkpoints_with_130(here):
    module = "--model.class_path=mine.Interrupted"
    words = ["fit", "--config=base.yaml", "--run_dir=run", module, WITHOUT_CHECKPOINTS]
    assert main(words) == 130
    log = (here / "run/run.log").read_text()
    assert "Ended by SIGINT, without a new checkpoint." in log


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")  # a child inherits signals that its parent ignores
def test_ctrl_c_ends_the_process_of_a_training_with_130_and_no_traceback():
    words = ["--model.class_path=mine.Slow", "--run_dir=run", WITHOUT_CHECKPOINTS]
    with running([*FIT, *words]) as process:
        assert any("training" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "SIGINT: ending now, without a new checkpoint." in stderr
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_two_ranks_share_one_directory(here):
    """The ranks are new interpreters."""
    run_program([*FIT, "--trainer.devices=2", "--trainer.strategy=ddp"])
    assert [path.name for path in (here / "runs" / "base").iterdir()] == ["0"]
    assert (here / "runs" / "base" / "0" / "run_rank1.log").exists()


def install(directory: Path, name: str, source: str) -> None:
    """Write a distribution with a plugin as an installer does."""
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[lit_grpo.plugins]\n{name} = {name}\n")
    (directory / f"{name}.py").write_text(source)


def test_installed_plugins_are_known_by_short_name_and_a_broken_one_is_skipped(
    here, monkeypatch, capsys, printed_config
):
    install(
        here / "site",
        "politeness_rewards",
        "from lit_grpo.rewards import Reward\n"
        "class PolitenessReward(Reward):\n"
        "    def score(self, prompt, completion):\n"
        "        return float('please' in completion.text)\n",
    )
    install(here / "site", "broken_plugin", "import nothing_here\n")
    monkeypatch.syspath_prepend(here / "site")
    config = printed_config("--config=base.yaml", "--model.rewards=[PolitenessReward]")
    assert config["model"]["rewards"][0]["class_path"] == "politeness_rewards.PolitenessReward"
    main(["fit", "--config=base.yaml", "--model.group_size=1"])
    warning, _ = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: plugin broken_plugin is skipped: ")
    assert "No module named 'nothing_here'" in warning


WARM_UP = {
    "trainer": BASE["trainer"] | {"max_steps": 5, "val_check_interval": 1},
    "model": {key: BASE["model"][key] for key in BASE["model"].keys() - {"rewards", "group_size"}},
    "data": BASE["data"],
}


def test_an_sft_run_logs_why_it_ended_and_what_is_next_and_can_be_evaluated(here, capfd, caplog):
    stop = {"monitor": "val/accuracy", "mode": "max", "stopping_threshold": -1.0}
    callbacks = [{"class_path": "EarlyStopping", "init_args": stop}]
    config = WARM_UP | {"trainer": WARM_UP["trainer"] | {"callbacks": callbacks}}
    config["trainer"]["check_val_every_n_epoch"] = None
    (here / "warm.yaml").write_text(yaml.safe_dump(config))
    assert main(["sft", "--config=warm.yaml", "--run_dir=warm"]) == 0
    run_log = (here / "warm" / "run.log").read_text()
    assert "ended after optimizer step 1: Stopping threshold reached" in run_log
    assert "Signaling" not in run_log
    assert caplog.messages[-2:] == [
        "Curves and a summary: lit-grpo report warm",
        "GRPO from here: lit-grpo fit --config my.yaml --model.policy.path warm/final",
    ]
    checkpoint = next((here / "warm").rglob("*.ckpt"))
    assert main(["validate", "--config=warm/config.yaml", f"--ckpt_path={checkpoint}"]) == 0
    assert "val/accuracy" in capfd.readouterr().out


@pytest.fixture
def warm_up_with_patience(here):
    """Write a config of a warm-up that ends once so many validations were no better."""

    def write(patience):
        stop = {"monitor": "val/accuracy", "mode": "max", "min_delta": 2.0, "patience": patience}
        callbacks = [{"class_path": "EarlyStopping", "init_args": stop}]
        trainer = WARM_UP["trainer"] | {"callbacks": callbacks, "check_val_every_n_epoch": None}
        (here / "warm.yaml").write_text(yaml.safe_dump(WARM_UP | {"trainer": trainer}))
        return ["sft", "--config=warm.yaml", "--run_dir=warm", "--ckpt_path=auto"]

    return write


@pytest.mark.slow
def test_a_run_that_early_stopping_ended_stays_as_it_is_until_it_gets_more_patience(
    here, warm_up_with_patience
):
    assert main(warm_up_with_patience(1)) == 0
    files = [here / "warm" / "final" / "model.safetensors", here / "warm" / "metrics.csv"]
    before = [(path.stat().st_mtime_ns, path.read_bytes()) for path in files]
    assert main(warm_up_with_patience(1)) == 0
    assert [(path.stat().st_mtime_ns, path.read_bytes()) for path in files] == before
    run_log = here / "warm" / "run.log"
    assert "EarlyStopping ended this run at step 2: Monitored metric" in run_log.read_text()
    assert main(warm_up_with_patience(2)) == 0
    assert "ended after optimizer step 3: Monitored metric" in run_log.read_text()


def test_the_config_of_an_sft_run_without_a_target_column_can_be_evaluated(here, capfd):
    (here / "warm.yaml").write_text(yaml.safe_dump(WARM_UP))
    assert main(["validate", "--config=warm.yaml"]) == 0
    assert "val/accuracy" in capfd.readouterr().out
    assert main(["fit", "--config=warm.yaml"]) == 2
    assert "Training without rewards is lit-grpo sft." in capfd.readouterr().err


def test_the_checkpoint_of_a_warm_up_is_refused_by_name(here, trained, capfd):
    words = ["--config=warm.yaml", "--run_dir=warm", "--trainer.max_steps=1"]
    (trained.parents[2] / "warm.yaml").write_text(yaml.safe_dump(WARM_UP))
    assert main(["sft", *words]) == 0
    checkpoint = "--ckpt_path=warm/checkpoints/last.ckpt"
    for words in (["fit", "--config=base.yaml"], ["validate", "runs/base/0"]):
        assert main([*words, checkpoint]) == 2
        assert "was written by lit-grpo sft" in capfd.readouterr().err


def test_settings_of_grpo_for_an_sft_run_are_refused_by_name(here, capsys):
    (here / "warm.yaml").write_text(
        yaml.safe_dump(WARM_UP | {"model": WARM_UP["model"] | {"target_column": "answer"}})
    )
    assert main(["rewards", "--config=warm.yaml", "--config=base.yaml"]) == 2
    assert "the configs must belong to one training" in capsys.readouterr().err


@pytest.mark.slow
def test_auto_starts_a_run_and_then_resumes_it(here):
    words = ["fit", "--config=base.yaml", "--run_dir=run", "--ckpt_path=auto"]
    (here / "run").mkdir()
    (here / "run" / "metrics.csv").write_text("step,seconds,resumes\n0,1.0,0\n1,2.0,0\n2,3.0,0\n")
    assert main(words) == 0  # a run that was killed before its first checkpoint
    assert steps_in(here / "run") == ["0", "1"]
    assert main([*words, "--trainer.max_steps=3"]) == 0
    assert steps_in(here / "run") == ["0", "1", "2"]
    log = (here / "run" / "run.log").read_text()
    assert log.count("resuming from") == 1


def test_auto_does_not_start_a_run_again_that_ended_and_has_lost_its_checkpoints(here, capfd):
    words = ["fit", "--config=base.yaml", "--run_dir=run", "--ckpt_path=auto"]
    assert main(words) == 0
    shutil.rmtree(here / "run" / "checkpoints")
    before = sorted(path for path in (here / "run").rglob("*"))
    assert main(words) == 2
    assert "run has a run that ended after step 2, and no checkpoint" in capfd.readouterr().err
    assert sorted(path for path in (here / "run").rglob("*")) == before


def content_of(run_dir: Path) -> dict[str, bytes]:
    """Return the files of a run but for its log, by their names."""
    files = [one for one in run_dir.rglob("*") if one.is_file() and one.name != "run.log"]
    return {str(one): one.read_bytes() for one in files}


@pytest.mark.slow
def test_rows_that_changed_in_their_file_are_not_trained_on_unless_that_is_wanted(here, capfd):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
    (here / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["fit", "--config=base.yaml", "--data=PromptData", "--data.train=[train.jsonl]"]
    words += ["--data.prompts_per_step=2", "--run_dir=run"]
    assert main(words) == 0
    for row in rows:  # held-out rows are among them, and their change is only told
        row["difficulty"] = 5  # as a reward may read it
    (here / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    before = content_of(here / "run")
    go_on = ["fit", "run", "--trainer.max_steps=3", "--model.optimizer.lr=0.5"]
    assert main(go_on) == 2
    error = capfd.readouterr().err
    assert "data.rows: " in error
    assert "Resume" not in error
    assert content_of(here / "run") == before
    assert main([*go_on, "--allow_changes"]) == 0
    assert steps_in(here / "run") == ["0", "1", "2"]


@pytest.mark.slow
def test_a_finished_run_that_trains_on_keeps_its_model_and_writes_a_new_one(here):
    words = ["fit", "--config=base.yaml", "--run_dir=run", "--ckpt_path=auto"]
    assert main(words) == 0
    assert main([*words, "--trainer.max_steps=4"]) == 0
    for name, steps in (("final.0", 2), ("final", 4)):
        assert f"{steps} optimizer steps" in (here / "run" / name / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model.policy.architecture.intermediate_size=96", "it belongs to a different policy"),
        ("--seed_everything=3", "seed_everything alone changes nothing here"),
    ],
)
def test_a_resume_that_cannot_be_meant_is_one_line(here, capfd, change, message):
    assert main(["fit", "--config=base.yaml", "--run_dir=run"]) == 0
    assert main(["fit", "run", "--trainer.max_steps=3", change, "--allow_changes"]) == 2
    assert message in capfd.readouterr().err.splitlines()[-1]


def test_callbacks_that_share_their_state_are_refused(here, capsys):
    one = {"class_path": "EarlyStopping", "init_args": {"monitor": "reward/mean"}}
    trainer = BASE["trainer"] | {"callbacks": [one, one]}
    (here / "twice.yaml").write_text(yaml.safe_dump(BASE | {"trainer": trainer}))
    assert main(["fit", "--config=twice.yaml"]) == 2
    assert "must be a list with one EarlyStopping of each kind, got 2" in capsys.readouterr().err


def test_code_beside_a_config_is_found_from_another_directory(here, capsys):
    (here / "project").mkdir()
    (here / "project" / "near_rewards.py").write_text(
        "from lit_grpo.rewards import Reward\n"
        "class One(Reward):\n"
        "    def score(self, prompt, completion):\n"
        "        return float(len(completion.text) % 2)\n"
    )
    config = BASE | {"model": BASE["model"] | {"rewards": ["near_rewards.One"]}}
    (here / "project" / "near.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config=project/near.yaml", "--run_dir=run"]) == 0
    assert main(["fit", "--config=base.yaml", "--model.rewards=[nowhere.One]"]) == 2
    assert f"Looked for it in {here} and beside the config files." in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_whose_code_is_missing_here_says_where_it_was_started(here, capsys, monkeypatch):
    project, elsewhere = here / "my project", here / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "project_rewards.py").write_text(
        "from lit_grpo.rewards import Reward\n"
        "class One(Reward):\n"
        "    def score(self, prompt, completion):\n"
        "        return float(len(completion.text) % 2)\n"
    )
    monkeypatch.chdir(project)
    words = [f"--config={here}/base.yaml", "--model.rewards=[project_rewards.One]"]
    assert main(["fit", *words, "--run_dir=run"]) == 0
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(project)])
    monkeypatch.delitem(sys.modules, "project_rewards")
    capsys.readouterr()
    assert main(["fit", "../my project/run", "--trainer.max_steps=3"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "No module named 'project_rewards'" in error
    command = error.partition("go on with: ")[2]
    assert command == f"cd '{project}' && lit-grpo fit run --trainer.max_steps=3"
    Path("more.yaml").write_text("{}")
    assert main(["fit", "../my project/run", "--config", "more.yaml"]) == 2
    assert f"--config {elsewhere}/more.yaml" in capsys.readouterr().err
    monkeypatch.chdir(project)
    assert main(shlex.split(command)[4:]) == 0
    assert steps_in(project / "run") == ["0", "1", "2"]
    assert main(["fit", "run", "--trainer.max_steps=2"]) == 2
    assert "last started in" not in capsys.readouterr().err  # it is here
    monkeypatch.chdir(elsewhere)
    assert main(["fit", "../my project/run", "--trainer.max_stepz=3"]) == 2
    error = capsys.readouterr().err
    assert "max_stepz: no such key" in error
    assert "last started in" not in error  # nothing is missing


@pytest.mark.slow
def test_without_a_login_of_wandb_the_run_goes_on_and_its_data_is_kept_in_the_run_directory(
    here, importer
):
    logger = ["--trainer.logger=WandbLogger", "--trainer.logger.project=x"]
    alone = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "nowhere", "HOME": str(here)}
    importer.run([*FIT[3:], *logger, "--run_dir=run"], here, **alone)
    said = " ".join((here / "said.txt").read_text().split())
    assert "wandb could not start (UsageError: No API key configured" in said
    assert "Traceback" not in said
    assert list((here / "run").glob("wandb/offline-run-*/*.wandb"))
    with running([*LIT_GRPO, "wandb-sync", "run"], **alone) as process:
        _, stderr = process.communicate(timeout=200)
    assert "wandb has sent 0 of 1 runs in run/wandb" in stderr


def test_the_engine_is_closed_after_an_error(here, capfd):
    (here / "mine_engine.py").write_text(
        "from lit_grpo.rollout import HFEngine\n"
        "class Broken(HFEngine):\n"
        "    def generate(self, *args, **kwargs):\n"
        "        raise RuntimeError('the server died')\n"
        "    def close(self):\n"
        "        print('the engine is closed')\n"
    )
    engine = "--model.engine.class_path=mine_engine.Broken"
    assert main(["fit", "--config=base.yaml", engine, "--run_dir=broken"]) == 1
    assert "the engine is closed" in capfd.readouterr().out
    said = (here / "broken" / "run.log").read_text()
    assert re.search(r"Stopped: mine_engine\.Broken\.generate \(\S+engine\.py:3\) failed:", said)
    assert "RuntimeError: the server died" in said


def test_sft_with_the_config_of_a_grpo_training_says_so(here, capsys):
    assert main(["sft", "--config=base.yaml"]) == 2
    error = capsys.readouterr().err
    assert "sft needs the config of an SFT run, and this one has model.rewards" in error
    assert "Use lit-grpo fit" in error


def test_an_accuracy_that_nobody_configured_is_named(here, capsys):
    (here / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (here / "length.yaml").write_text(
        "model: {rewards: [{class_path: LengthReward, init_args: "
        "{start_tokens: 1, end_tokens: 9}}]}\n"
        "data: {class_path: PromptData, init_args: {train: rows.jsonl, validation: rows.jsonl, "
        "validation_size: 0, require_answer: false, prompts_per_step: 2}}\n"
    )
    assert main(["fit", "--config=base.yaml", "--config=length.yaml"]) == 2
    assert "set model.evaluation.accuracy to a reward" in capsys.readouterr().err


OWN_ERRORS = """
import json
from lightning.pytorch import Callback
from lit_grpo.data import PromptDataModule
from lit_grpo.rewards import Reward

class Rows(PromptDataModule):
    def rows(self, split):
        return json.loads("")

class Empty(PromptDataModule):
    def rows(self, split):
        return []

class Score(Reward):
    def __init__(self):
        int("seven")

class Setup(Callback):
    def setup(self, *arguments, **keywords):
        open("absent.json")
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--data=own_errors.Rows"],
            "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (own_errors.py, line 9)",
        ),
        (
            ["--model.rewards=[own_errors.Score]"],
            "ValueError: invalid literal for int() with base 10: 'seven' (own_errors.py, line 17)",
        ),
        (
            ["--trainer.callbacks+=own_errors.Setup"],
            "[Errno 2] No such file or directory: 'absent.json' (own_errors.py, line 21)",
        ),
        (["--data=own_errors.Empty"], "Set what Empty.rows('train') returns."),
        (["--trainer.callbacks+=own_errors.Score"], "own_errors.Score is not a Callback."),
    ],
)
def test_an_error_of_the_users_own_code_names_its_line(arguments, said, here, capsys):
    (here / "own_errors.py").write_text(OWN_ERRORS)
    assert main(["fit", "--config=base.yaml", *arguments]) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
    assert said in line
