"""The commands on real, tiny runs, in processes of their own where it is about how these end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from cli_base import BASE
from run_logs import close_logs

from lit_grpo.__main__ import main
from lit_grpo.cli.app import CommandLine
from lit_grpo.cli.configs import look_at
from lit_grpo.cli.run_dir import RUN_DIR_VARIABLE
from lit_grpo.runs.files import CompletionsFile, FinalModel, MetricsFile

MINE = """
import threading, time
from lightning.pytorch import Callback
from lit_grpo.training.grpo import GRPOModule
from lit_grpo.types import StopReason

class Wider(GRPOModule):
    def __init__(self, *args, extra: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        self.extra = extra

class Buggy(GRPOModule):
    def training_step(self, prompts, batch_idx):
        raise ValueError("shapes do not match")

class Slow(GRPOModule):
    def training_step(self, prompts, batch_idx):
        print("training", flush=True)
        time.sleep(600)

class Stop(Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = True
        trainer.stop_reason = StopReason(exit_code=42, message="nothing to learn.")

class LeaveThread(Callback):
    def on_train_end(self, trainer, pl_module):
        threading.Thread(target=time.sleep, args=(600,)).start()
"""


@pytest.fixture(scope="module", autouse=True)
def process_as_it_was():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", sys.path.copy())
        patch.setenv(RUN_DIR_VARIABLE, "")
        yield


@pytest.fixture(autouse=True)
def logs_are_closed():
    close_logs()
    yield
    close_logs()


def write_configs(directory: Path) -> None:
    (directory / "base.yaml").write_text(yaml.safe_dump(BASE))
    (directory / "mine.py").write_text(MINE)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    write_configs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def command_line(*arguments: str, command: str = "fit") -> CommandLine:
    """A parsed and instantiated command that has not run."""
    invocation = look_at(["--config=base.yaml", "--run_dir=run", *arguments])
    return CommandLine(command, invocation, "run")


def printed_config(capsys, *arguments: str) -> dict:
    with pytest.raises(SystemExit) as leave:
        main(["fit", *arguments, "--print_config"])
    assert leave.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


# A whole run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    write_configs(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert main(["fit", "--config", "base.yaml", "--trainer.logger=false"]) == 0
    return directory / "runs" / "base" / "0"


@pytest.fixture
def trained(run_dir, monkeypatch) -> Path:
    monkeypatch.chdir(run_dir.parents[2])
    return run_dir


def files_in(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def steps_in(run_dir: Path) -> list[str]:
    lines = (run_dir / "metrics.csv").read_text().splitlines()
    return [line.split(",")[0] for line in lines[1:]]


def test_a_run_leaves_its_files_whatever_the_config_lists(trained):
    assert steps_in(trained) == ["0", "1"]
    assert len(list(trained.glob("completions/*.parquet"))) == 2
    assert len(list(trained.glob("checkpoints/*.ckpt"))) == 1
    assert (trained / "final" / "model.safetensors").is_file()
    assert "run directory: runs/base/0" in (trained / "run.log").read_text()


def test_the_saved_config_is_complete_and_reads_back_as_itself(trained, capsys):
    saved = yaml.safe_load((trained / "config.yaml").read_text())
    assert saved["run_dir"] == "runs/base/0"
    assert saved["model"]["objective"]["surrogate"] == "clip"
    assert printed_config(capsys, "--config=runs/base/0/config.yaml") == saved


def test_a_fresh_run_where_one_has_been_is_refused_and_nothing_is_lost(trained, capsys):
    before = files_in(trained)
    assert main(["fit", "--config=runs/base/0/config.yaml"]) == 2
    assert "runs/base/0 holds a run already" in capsys.readouterr().err
    assert files_in(trained) == before


@pytest.mark.parametrize("command", ["validate", "test"])
def test_measuring_prints_and_writes_nothing(command, trained, capsys):
    before = files_in(trained.parents[2])
    arguments = ["--config=runs/base/0/config.yaml", "--ckpt_path=last"]
    assert main([command, *arguments]) == 0
    prefix = "test" if command == "test" else "val"
    assert f"{prefix}/accuracy" in capsys.readouterr().out
    assert files_in(trained.parents[2]) == before


def test_a_report_of_a_run_draws_its_curves(trained, capsys):
    assert main(["report", "runs/base/0"]) == 0
    assert (trained / "curves.png").is_file()
    assert main(["report", "runs/base/9"]) == 2
    assert capsys.readouterr().err.startswith("error: runs/base/9: no such run directory.")


def test_the_last_checkpoint_of_the_latest_run_goes_on_in_its_directory(trained):
    arguments = ["--config=base.yaml", "--ckpt_path=last", "--trainer.max_steps=3"]
    assert main(["fit", *arguments]) == 0
    assert steps_in(trained) == ["0", "1", "2"]
    assert yaml.safe_load((trained / "config.yaml").read_text())["ckpt_path"] is None


@pytest.mark.slow
def test_two_ranks_share_one_directory(here):
    two = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config=base.yaml", *two]
    process = subprocess.Popen(command, cwd=here, start_new_session=True)
    try:
        assert process.wait(timeout=200) == 0
    finally:
        kill_group(process)
    assert [path.name for path in (here / "runs" / "base").iterdir()] == ["0"]
    assert (here / "runs" / "base" / "0" / "run_rank1.log").exists()


# What is asked for


def test_later_files_override_earlier_ones_and_arguments_override_files(here, capsys):
    (here / "more.yaml").write_text("model: {group_size: 4, seed: 4}\ntrainer: {max_steps: 4}")
    files = ["--config=base.yaml", "--config=more.yaml"]
    config = printed_config(capsys, "--model.group_size=8", *files)
    assert config["model"]["group_size"] == 8
    assert config["model"]["seed"] == 4
    assert config["trainer"]["max_steps"] == 4
    assert config["model"]["sampling"]["max_tokens"] == 3


def test_interpolation_sees_later_files_and_arguments_at_any_depth(here, capsys):
    (here / "first.yaml").write_text(
        "trainer:\n"
        "  callbacks:\n"
        "  - {class_path: ModelCheckpoint, init_args: {dirpath: '${run_dir}/best'}}\n"
        "model: {warmup_steps: '${trainer.max_steps}'}\n"
    )
    (here / "second.yaml").write_text("run_dir: elsewhere")
    files = [f"--config={name}.yaml" for name in ("base", "first", "second")]
    config = printed_config(capsys, *files, "--trainer.max_steps=9")
    assert config["trainer"]["callbacks"][0]["init_args"]["dirpath"] == "elsewhere/best"
    assert config["model"]["warmup_steps"] == 9


def test_callbacks_are_appended_from_files_and_arguments(here, capsys):
    (here / "more.yaml").write_text("trainer: {callbacks+: [{class_path: mine.Stop}]}")
    (here / "first.yaml").write_text("trainer: {callbacks: [LearningRateMonitor]}")
    files = [f"--config={name}.yaml" for name in ("base", "first", "more")]
    appended = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=reward/mean"]
    callbacks = printed_config(capsys, *files, *appended)["trainer"]["callbacks"]
    names = [callback["class_path"].rsplit(".", 1)[-1] for callback in callbacks]
    assert names == ["LearningRateMonitor", "Stop", "EarlyStopping"]
    assert callbacks[2]["init_args"]["monitor"] == "reward/mean"


def test_a_user_s_module_takes_the_keys_of_the_shipped_one_and_its_own(here):
    cli = command_line("--model.class_path=mine.Wider", "--model.extra=7")
    assert (cli.model.extra, cli.model.group_size) == (7, 2)


def test_a_checkpoint_s_hyper_parameters_never_override_what_is_asked_for(here):
    torch.save({"hyper_parameters": {"group_size": 16}}, "other.ckpt")
    assert command_line("--ckpt_path=other.ckpt").model.group_size == 2


# What is always on


@pytest.mark.parametrize("logger", ["null", "false", "true"])
def test_metrics_are_kept_whatever_logger_is_set(logger, here):
    loggers = command_line(f"--trainer.logger={logger}").trainer.loggers
    assert [type(logger) for logger in loggers] == [MetricsFile]


def test_a_user_s_loggers_and_callbacks_stay_beside_those_always_on(here):
    cli = command_line(
        "--trainer.logger={class_path: CSVLogger, init_args: {save_dir: other}}",
        "--trainer.callbacks=mine.Stop",
    )
    assert [type(logger).__name__ for logger in cli.trainer.loggers] == ["MetricsFile", "CSVLogger"]
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert {"Stop", CompletionsFile.__name__, FinalModel.__name__} <= set(names)


# Run directories


def test_runs_are_numbered_and_what_never_ran_leaves_no_directory(here, capsys):
    assert printed_config(capsys, "--config=base.yaml")["run_dir"] == "runs/base/0"
    assert main(["fit", "--config=base.yaml", "--model.group_size=1"]) == 2
    assert not (here / "runs").exists()
    (here / "runs" / "base" / "4").mkdir(parents=True)
    assert printed_config(capsys, "--config=base.yaml")["run_dir"] == "runs/base/5"


# How it ends


def test_a_callback_s_stop_reason_is_the_last_word_and_the_exit_code(here, capsys):
    assert main(["fit", "--config=base.yaml", "--trainer.callbacks=mine.Stop"]) == 42
    assert capsys.readouterr().err.endswith("nothing to learn.\n")
    assert steps_in(here / "runs" / "base" / "0") == ["0"]


def test_a_bug_shows_its_traceback_on_the_terminal_and_in_the_log(here, capsys):
    assert main(["fit", "--config=base.yaml", "--model.class_path=mine.Buggy"]) == 1
    for text in (capsys.readouterr().err, (here / "runs/base/0/run.log").read_text()):
        assert "Traceback" in text
        assert "ValueError: shapes do not match" in text


def test_wrong_data_is_one_line_on_the_terminal_and_a_traceback_in_the_log(here, capsys):
    (here / "bad.jsonl").write_text("{broken\n")
    (here / "more.yaml").write_text("data: {class_path: PromptData, init_args: {train: bad.jsonl}}")
    assert main(["fit", "--config=base.yaml", "--config=more.yaml", "--run_dir=run"]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("error: ")
    assert "bad.jsonl" in last_line
    assert "Traceback" in (here / "run" / "run.log").read_text()


def start(directory: Path, *arguments: str, source: str = "") -> subprocess.Popen[str]:
    script = f"import sys\nfrom lit_grpo import __main__\n{source}\nsys.exit(__main__.main())"
    return subprocess.Popen(
        [sys.executable, "-c", script, "fit", "--config=base.yaml", "--run_dir=run", *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def kill_group(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def test_ctrl_c_exits_with_130_and_no_traceback(here):
    process = start(here, "--model.class_path=mine.Slow")
    try:
        assert any("training" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        kill_group(process)
    assert process.returncode == 130
    assert stderr.endswith("error: interrupted.\n")
    assert "Traceback" not in stderr


def test_a_thread_left_behind_does_not_keep_the_process_or_change_its_exit_code(here):
    callbacks = ["--trainer.callbacks+=mine.Stop", "--trainer.callbacks+=mine.LeaveThread"]
    process = start(here, *callbacks, source="__main__.SHUTDOWN_SECONDS = 0.5")
    try:
        process.communicate(timeout=120)
    finally:
        kill_group(process)
    assert process.returncode == 42


def install(directory: Path, name: str, source: str) -> None:
    """Makes a distribution with a plugin as an installer leaves it."""
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[lit_grpo.plugins]\n{name} = {name}\n")
    (directory / f"{name}.py").write_text(source)


def test_installed_plugins_are_known_by_short_name_and_a_broken_one_is_left_out(
    here, monkeypatch, capsys
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
    config = printed_config(capsys, "--config=base.yaml", "--model.rewards=[PolitenessReward]")
    assert config["model"]["rewards"][0]["class_path"] == "politeness_rewards.PolitenessReward"
    main(["fit", "--config=base.yaml", "--model.group_size=1"])
    warning, _ = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: plugin broken_plugin is left out: ")
    assert "No module named 'nothing_here'" in warning


WARM_UP = {
    "trainer": BASE["trainer"] | {"max_steps": 5, "val_check_interval": 1},
    "model": {key: BASE["model"][key] for key in BASE["model"].keys() - {"rewards", "group_size"}},
    "data": BASE["data"],
}


def test_a_warm_up_can_be_measured_and_says_why_it_ended(here, capfd):
    stop = {"monitor": "val/accuracy", "mode": "max", "stopping_threshold": -1.0}
    callbacks = [{"class_path": "EarlyStopping", "init_args": stop}]
    config = WARM_UP | {"trainer": WARM_UP["trainer"] | {"callbacks": callbacks}}
    config["trainer"]["check_val_every_n_epoch"] = None
    (here / "warm.yaml").write_text(yaml.safe_dump(config))
    assert main(["sft", "--config=warm.yaml", "--run_dir=warm"]) == 0
    run_log = (here / "warm" / "run.log").read_text()
    assert "ended after optimizer step 1: Stopping threshold reached" in run_log
    checkpoint = next((here / "warm").rglob("*.ckpt"))
    assert main(["validate", "--config=warm/config.yaml", f"--ckpt_path={checkpoint}"]) == 0
    assert "val/accuracy" in capfd.readouterr().out


def test_engine_and_rewards_are_closed_after_an_error_too(here, capfd):
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
    shown = capfd.readouterr()
    assert "the engine is closed" in shown.out
    assert "the server died" in shown.err
