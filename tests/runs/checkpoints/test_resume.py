from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from empty_checkpoints import write_empty
from lightning.pytorch.callbacks import ModelCheckpoint
from run_logs import workplace
from toy_rollouts import fit, outputs, rollouts

from lit_grpo.__main__ import main
from lit_grpo.callbacks import Checkpoints
from lit_grpo.runs.checkpoints.files import link_last
from lit_grpo.runs.checkpoints.resume import find_checkpoint
from lit_grpo.runs.files.events import read_events
from lit_grpo.types import UserError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_checkpoint_is_found_by_path_and_as_the_last_of_the_run(here):
    write_empty(here / "run" / "checkpoints" / "last.ckpt", here / "other.ckpt")
    assert find_checkpoint("last", here / "run") == str(here / "run/checkpoints/last.ckpt")
    assert find_checkpoint("other.ckpt", here / "run") == "other.ckpt"
    with pytest.raises(ValueError, match="empty holds no run to go on with .*counts from"):
        find_checkpoint("last", here / "empty")
    write_empty(here / "begun" / "run.log")
    with pytest.raises(ValueError, match="has no checkpoint to go on from"):
        find_checkpoint("last", here / "begun")
    with pytest.raises(ValueError, match=r"none\.ckpt: no such checkpoint\. In \. are other\.ckpt"):
        find_checkpoint("none.ckpt", here / "run")
    with pytest.raises(ValueError, match=r"x\.ckpt: no such checkpoint\. Set ckpt_path"):
        find_checkpoint("nowhere/x.ckpt", here / "run")


def test_a_damaged_checkpoint_with_a_link_to_it_is_read_and_named_once(here, caplog):
    intact, damaged = (here / "run/checkpoints" / f"step_{n}.ckpt" for n in (1, 2))
    write_empty(intact, damaged)
    link_last(damaged)
    damaged.write_bytes(damaged.read_bytes()[:-10])
    assert find_checkpoint("last", here / "run") == str(intact)
    (message,) = caplog.messages
    assert message == f"{damaged} is damaged and passed over: it was not written to its end"


def test_a_damaged_checkpoint_is_refused_and_the_newest_intact_one_is_the_last(here, caplog):
    intact, damaged = (here / "run/checkpoints" / name for name in ("step=1.ckpt", "last.ckpt"))
    write_empty(intact, damaged)
    damaged.write_bytes(damaged.read_bytes()[:-10])
    assert find_checkpoint("last", here / "run") == str(intact)
    assert "last.ckpt is damaged" in caplog.text
    assert "last.ckpt is damaged and passed over" in (here / "run" / "run.log").read_text()
    (event,) = read_events(here / "run")
    assert (event.kind, event.cause) == ("warning", "checkpoint_damaged")
    assert event.message == (
        "last.ckpt is damaged: it was not written to its end. The run goes on from step=1.ckpt."
    )
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged: .* Set ckpt_path to last"):
        find_checkpoint(str(damaged), here / "run")
    intact.unlink()
    caplog.clear()
    with pytest.raises(ValueError, match="has no intact checkpoint to go on from"):
        find_checkpoint("last", here / "run")
    assert caplog.messages == []  # the error names all of them


def test_an_empty_text_is_no_checkpoint(here):
    with pytest.raises(UserError, match="ckpt_path must be a file, last, best or auto, got an emp"):
        find_checkpoint("", here / "run")


def test_auto_is_the_last_one_or_none_where_there_is_none(here):
    assert find_checkpoint("auto", here / "run") is None
    last = here / "run/checkpoints/last.ckpt"
    write_empty(last)
    assert find_checkpoint("auto", here / "run") == str(last)


def test_auto_refuses_a_run_whose_checkpoints_are_all_damaged_and_names_the_ways_out(here):
    torn, link = (here / "run/checkpoints" / name for name in ("step_1.ckpt", "last.ckpt"))
    write_empty(torn)
    link.symlink_to(torn.name)
    torn.write_bytes(b"torn")
    ways = (
        r"Put an intact copy .* in ckpt_path; to start again move .*run away, or set another run_d"
    )
    with pytest.raises(
        UserError, match=rf"\(step_1.ckpt: it was not written to its end\)\. {ways}"
    ):
        find_checkpoint("auto", here / "run")  # starting again would overwrite the run
    torn.unlink()
    with pytest.raises(UserError, match=r"\(last.ckpt: the file that it names is gone\)\. Put"):
        find_checkpoint("auto", here / "run")


def test_auto_with_damaged_checkpoints_only_ends_with_exit_code_2_and_changes_nothing(here, capsys):
    torn = here / "run/checkpoints/step_000001.ckpt"
    write_empty(torn)
    torn.write_bytes(b"torn")
    (here / "run/metrics.csv").write_text("step,seconds\n0,1\n")
    arguments = ["fit", "--config", "debug", "--run_dir", "run", "--ckpt_path", "auto"]
    assert main(arguments) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
    assert "step_000001.ckpt: it was not written to its end" in line
    assert (here / "run/metrics.csv").read_text() == "step,seconds\n0,1\n"
    assert torn.read_bytes() == b"torn"


@pytest.mark.slow
def test_the_best_is_that_of_the_callback_with_a_monitor(here, caplog, capsys):
    best = {"class_path": "Checkpoints", "init_args": {"monitor": "val/accuracy"}}
    every_step = {"val_check_interval": 1, "check_val_every_n_epoch": None}
    trainer = BASE["trainer"] | every_step | {"callbacks": [best]}
    Path("mine.yaml").write_text(yaml.safe_dump(BASE | {"trainer": trainer}))
    with workplace(here):
        assert main(["fit", "--config=mine.yaml", "--run_dir=run"]) == 0
        assert main(["test", "run", "--ckpt_path=best"]) == 0
        assert "evaluating run/checkpoints/best.ckpt" in caplog.text
        assert main(["fit", "run", "--ckpt_path=best"]) == 0  # no later one was better
        assert "resuming from run/checkpoints/best.ckpt after rollout step 1" in caplog.text
        Path("run/checkpoints/best.ckpt").write_bytes(b"torn")
        assert main(["test", "run", "--ckpt_path=best"]) == 2
    assert "run/checkpoints/best.ckpt is damaged" in capsys.readouterr().err


def keep_best(directory: Path, run: Path) -> None:
    """Train with Lightning's callback, which keeps its best checkpoint in a directory."""
    checkpoint = ModelCheckpoint(directory, monitor="val/accuracy", filename="top")
    last = Checkpoints(dirpath=str(run / "checkpoints"))
    step = outputs(rollouts([[0.0, 1.0]]))
    fit(lambda _: step, [checkpoint, last], validate_every=1, enable_checkpointing=True)


def test_the_best_of_lightnings_callback_is_found_in_a_run_that_was_moved_or_copied(here):
    keep_best(here / "run/checkpoints", here / "run")
    shutil.copytree(here / "run", here / "copy", symlinks=True)
    assert find_checkpoint("best", here / "copy") == str(here / "copy/checkpoints/top.ckpt")
    (here / "run").rename(here / "moved")
    assert find_checkpoint("best", here / "moved") == str(here / "moved/checkpoints/top.ckpt")
    assert find_checkpoint("best", Path("moved")) == "moved/checkpoints/top.ckpt"


def test_the_best_of_lightnings_callback_in_a_directory_of_its_own_stays_there(here):
    write_empty(here / "run/checkpoints/top.ckpt")  # older than the last one
    keep_best(here / "mine", here / "run")
    assert find_checkpoint("best", here / "run") == str(here / "mine/top.ckpt")
    (here / "mine").rename(here / "gone")
    assert find_checkpoint("best", here / "run") == str(here / "run/checkpoints/top.ckpt")


def test_a_run_without_a_best_one_is_told_what_to_pass(here):
    write_empty(here / "a run/checkpoints/last.ckpt")
    with pytest.raises(UserError, match="has no best checkpoint.* with a monitor, such as val/acc"):
        find_checkpoint("best", Path("a run"))
    with pytest.raises(UserError, match="to last, or .* lit-grpo checkpoints 'a run' lists"):
        find_checkpoint("best", Path("a run"))
    with pytest.raises(UserError, match="nowhere has no best checkpoint"):
        find_checkpoint("best", Path("nowhere"))


def test_a_directory_of_a_run_or_a_model_is_no_checkpoint(here):
    (here / "run/final").mkdir(parents=True)
    with pytest.raises(ValueError, match="is a directory: ckpt_path must be .* lit-grpo fit runs"):
        find_checkpoint("run/final", here / "run")
    for part in ("meta.pt", ".metadata"):  # a sharded one
        (here / "run/final" / part).touch()
    assert find_checkpoint("run/final", here / "run") == "run/final"


@pytest.mark.parametrize("name", ["train.jsonl", "final.safetensors", "data.zip"])
def test_a_file_of_another_kind_is_no_checkpoint_rather_than_a_damaged_one(name, here, capsys):
    Path("my.yaml").write_text(
        "model: {policy: {path: x}, rewards: [MathReward]}\ndata: AdditionData"
    )
    Path(name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    if name == "data.zip":
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr("train.jsonl", "{}")
    assert main(["fit", "--config=my.yaml", "--ckpt_path", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {name} is no checkpoint: ckpt_path must be a checkpoint, such")
    assert "for data set data.train" in line


def test_a_torn_checkpoint_of_any_name_is_damaged(here):
    write_empty(here / "best.pt")
    (here / "best.pt").write_bytes((here / "best.pt").read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"best\.pt is damaged"):
        find_checkpoint("best.pt", here / "run")
