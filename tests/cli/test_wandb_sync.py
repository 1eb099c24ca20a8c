"""The command that sends what wandb has kept: with a stand-in for wandb, and with the real one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from http_answers import answering
from processes import LIT_GRPO, run_program

from lit_grpo.__main__ import main

PROGRAM = """
import json, os, sys
from pathlib import Path
Path("called.json").write_text(json.dumps(sys.argv[1:]))
print("wandb: Syncing...")
for path in sys.argv[2:]:
    if os.environ["SENDS"] == "all" and not path.startswith("-"):
        (log,) = Path(path).glob("*.wandb")
        log.with_name(f"{log.name}.synced").touch()
sys.exit(int(os.environ["EXIT_CODE"]))
"""


@pytest.fixture
def wandb(here, monkeypatch) -> Path:
    """A package with wandb's command line, which notes its arguments."""
    (here / "packages/wandb").mkdir(parents=True)
    (here / "packages/wandb/__init__.py").touch()
    (here / "packages/wandb/__main__.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(here / "packages"))
    monkeypatch.setenv("SENDS", "all")
    monkeypatch.setenv("EXIT_CODE", "0")
    return here / "called.json"


def make_run(here: Path, name: str, *, is_sent: bool = False) -> str:
    directory = here / "run/wandb" / name
    directory.mkdir(parents=True)
    (directory / "run-abc.wandb").touch()
    if is_sent:
        (directory / "run-abc.wandb.synced").touch()
    return f"run/wandb/{name}"


def test_all_that_was_not_sent_is_given_to_wandb(here, wandb, capfd):
    left = [make_run(here, f"offline-run-2026112{n}_100000-abc") for n in (3, 1)]
    make_run(here, "offline-run-20261120_100000-abc", is_sent=True)
    online = make_run(here, "run-20261124_100000-abc")
    assert main(["wandb-sync", "run"]) == 0
    assert json.loads(wandb.read_text()) == ["sync", *sorted(left)]
    assert capfd.readouterr().out.startswith("sending 2 wandb runs of run; wandb retries silently")
    assert main(["wandb-sync", "run", "--include_online"]) == 0
    assert json.loads(wandb.read_text()) == ["sync", "--include-online", online]


@pytest.mark.parametrize(
    ("save_dir", "place"),
    [("${run_dir}/logs", "run/logs"), ("elsewhere", "elsewhere"), (".", "run")],
)
@pytest.mark.parametrize("is_list", [False, True])
def test_the_config_of_a_run_says_where_wandb_wrote(save_dir, place, is_list, here, wandb):
    logger = {
        "class_path": "lightning.pytorch.loggers.WandbLogger",
        "init_args": {"save_dir": save_dir},
    }
    other = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "x"}}
    config = {"trainer": {"logger": [other, logger] if is_list else logger}}
    left = here / place / "wandb" / "offline-run-20261123_100000-abc"
    left.mkdir(parents=True)
    (left / "run-abc.wandb").touch()
    (here / "run").mkdir(exist_ok=True)
    (here / "run/config.yaml").write_text(yaml.safe_dump(config))
    assert main(["wandb-sync", "run"]) == 0
    assert json.loads(wandb.read_text()) == ["sync", f"{place}/wandb/{left.name}"]


@pytest.mark.parametrize(("sends", "exit_code"), [("all", "1"), ("none", "0")])
def test_a_failure_is_one_line_after_what_wandb_says(
    sends, exit_code, here, wandb, monkeypatch, capfd
):
    monkeypatch.setenv("SENDS", sends)
    monkeypatch.setenv("EXIT_CODE", exit_code)
    make_run(here, "offline-run-20261123_100000-abc")
    assert main(["wandb-sync", "run"]) == 1
    said = capfd.readouterr()
    assert said.out.endswith("nothing is lost)\nwandb: Syncing...\n")
    assert said.err.startswith("error: wandb has ")
    assert "run/wandb; it says above why" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "wandb-sync needs RUN: the run with unsent data in wandb/."),
        (["nowhere"], "nowhere: no such run directory."),
        (["run"], "run/wandb has nothing to send"),
        (["run", "--all"], "unrecognized arguments: --all. See lit-grpo wandb-sync --help."),
    ],
)
def test_mistakes_are_one_line(arguments, line, here, wandb, capfd):
    make_run(here, "offline-run-20261123_100000-abc", is_sent=True)
    assert main(["wandb-sync", *arguments]) == 2
    said = capfd.readouterr()
    assert line in said.err
    assert said.err.count("\n") == 1
    assert not wandb.exists()


def test_without_wandb_the_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["wandb-sync", "run"]) == 2
    assert "Install lit-grpo[wandb]." in capsys.readouterr().err


LOGGED_OFFLINE = """
import wandb
run = wandb.init(project="test", id="abc", mode="offline", dir="run")
run.log({"reward": 1.0})
run.finish()
"""
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_API_KEY": "0" * 40}


@pytest.fixture
def logged_offline(here) -> Path:
    """The directory of a run that the real wandb has logged offline."""
    (here / "run").mkdir()
    run_program([sys.executable, "-c", LOGGED_OFFLINE], here, **QUIET, HOME=str(here))
    (directory,) = here.glob("run/wandb/offline-run-*-abc")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", "0" * 40])
def test_the_real_wandb_without_a_valid_login(key, here, logged_offline):
    def refuse(body):
        return 401, {}

    with answering({"POST /graphql": refuse}) as url:
        settings = QUIET | {"WANDB_API_KEY": key, "HOME": str(here), "WANDB_BASE_URL": url}
        done = run_program([*LIT_GRPO, "wandb-sync", "run"], here, exit_code=1, **settings)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: wandb has sent 0 of 1 runs in run/wandb; it says above why.")


def answer(body) -> tuple[int, dict]:
    """Answer as wandb's service does to the first calls of a run, and ask for none of its files."""
    project = {"id": "1", "name": "test", "entity": {"id": "1", "name": "me"}}
    bucket = {"id": "1", "name": "abc", "displayName": "abc", "project": project}
    made = {
        "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": True}},
        "CreateRunFiles": {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []}},
    }
    return 200, {"data": made.get(body["operationName"], {})}


@pytest.mark.slow
def test_the_real_wandb_sends_what_was_logged_offline_once(here, logged_offline, capsys):
    requests: list = []
    streamed = "POST /files/me/test/abc/file_stream"
    with answering({"POST /graphql": answer, streamed: {}}, requests) as url:
        settings = QUIET | {"HOME": str(here), "WANDB_BASE_URL": url}
        run_program([*LIT_GRPO, "wandb-sync", "run"], here, **settings)
    assert main(["wandb-sync", "run"]) == 2
    assert "run/wandb has nothing to send" in capsys.readouterr().err
    bodies = [body for path, body in requests if path == streamed]
    files = [body.get("files", {}).get("wandb-history.jsonl") for body in bodies]
    rows = [json.loads(line) for file in files if file for line in file["content"]]
    assert [row["reward"] for row in rows] == [1.0]
    assert bodies[-1]["complete"] is True
    assert bodies[-1]["exitcode"] == 0
