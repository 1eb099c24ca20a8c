"""The command that sends what wandb has kept: with a stand-in for wandb, and with the real one."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
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
    assert capfd.readouterr().out == "wandb: Syncing...\n"
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
    assert said.out == "wandb: Syncing...\n"
    assert said.err.startswith("error: wandb has ")
    assert "run/wandb; it says above why" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "required: run_dir. See lit-grpo wandb-sync --help."),
        (["nowhere"], "nowhere/wandb has nothing to send"),
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
run = wandb.init(project="test", mode="offline", dir="run")
run.log({"reward": 1.0})
run.finish()
"""


class Refusing(BaseHTTPRequestHandler):
    """A server that accepts no key."""

    def do_POST(self):
        self.send_response(401)
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *args): ...


@pytest.mark.slow
@pytest.mark.parametrize("has_key", [False, True])
def test_the_real_wandb_without_a_valid_login(has_key, here):
    (here / "run").mkdir()
    quiet = {"WANDB_ERROR_REPORTING": "false", "HOME": str(here)}
    run_program([sys.executable, "-c", LOGGED_OFFLINE], here, **quiet)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    quiet["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
    if has_key:
        quiet["WANDB_API_KEY"] = "0" * 40
    done = run_program([*LIT_GRPO, "wandb-sync", "run"], here, exit_code=1, **quiet)
    server.shutdown()
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: wandb has sent 0 of 1 runs in run/wandb; it says above why.")
