from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from lightning.pytorch.callbacks import Callback
from toy_rollouts import fit, outputs, rollouts

from lit_grpo.callbacks import Alerts, ZeroRewardBreaker
from lit_grpo.runs.files.events import EventsFile, record_event
from lit_grpo.types import UserError

ZERO = outputs(rollouts([[0.0, 0.0]]))


def run(tmp_path, *callbacks):
    breaker = ZeroRewardBreaker(alert_after=1, stop_after=2)
    callbacks = [breaker, *callbacks, EventsFile(tmp_path)]
    return fit(lambda step: ZERO, callbacks, steps=9, default_root_dir=str(tmp_path))


def test_a_command_reads_the_message_and_the_event(tmp_path):
    script = tmp_path / "tell me.sh"
    script.write_text(
        '#!/bin/sh\n(echo "$1 $LIT_GRPO_KIND $LIT_GRPO_STEP $LIT_GRPO_RUN"; cat) >> '
        f"'{tmp_path}/told'\n"
    )
    script.chmod(0o755)
    run(tmp_path, Alerts(command=f"'{script}' 'two words'"))
    told = (tmp_path / "told").read_text()
    assert told.startswith(
        f"two words alert 1 {tmp_path}\n{tmp_path}, after 1 rollout step: alert. No rew"
    )
    assert (
        f"two words stop 2 {tmp_path}\n{tmp_path}, after 2 rollout steps: stop. No reward for 2"
        in told
    )


class Hook(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def hook():
    server = HTTPServer(("127.0.0.1", 0), Hook)
    server.received = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_the_event_as_json(tmp_path, hook):
    run(tmp_path, Alerts(webhook=f"http://127.0.0.1:{hook.server_port}/x", kinds=("stop",)))
    (event,) = hook.received
    assert event["kind"] == "stop"
    assert event["step"] == 2
    assert event["run"] == str(tmp_path)
    assert event["text"].startswith(
        f"{tmp_path}, after 2 rollout steps: stop. No reward for 2 rollout"
    )
    assert event["message"] in event["text"] + "."


@pytest.mark.parametrize(
    "settings",
    [
        {"command": ["false", "an argument"]},
        {"command": "sh -c 'exit 1'"},
        {"webhook": "http://127.0.0.1:1/"},
    ],
)
def test_an_alert_that_cannot_be_sent_is_logged_and_the_run_goes_on(tmp_path, settings, caplog):
    trainer = run(tmp_path, Alerts(**settings))
    assert trainer.global_step == 2
    assert "an alert could not be sent" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "must have a command or a webhook"),
        ({"webhook": "hooks.example"}, "must be a URL"),
        ({"command": "/no/such/program -x"}, "a program that exists.*got '/no/such/program'"),
        ({"command": ["no-such-program"]}, "a program that exists.*got 'no-such-program'"),
        ({"command": "sh -c 'exit 1"}, "No closing quotation"),
    ],
)
def test_alerts_without_a_place_to_go_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        Alerts(**settings)


def test_a_warning_is_sent_only_if_its_kind_is_listed(tmp_path):
    class Warns(Callback):
        def on_train_start(self, trainer, pl_module):
            record_event(trainer, "warning", "Rather slow", "slow_stage")

    script = tmp_path / "tell"
    script.write_text(f"#!/bin/sh\necho \"$LIT_GRPO_KIND\" >> '{tmp_path}/told'\n")
    script.chmod(0o755)
    run(tmp_path, Alerts(command=str(script)), Warns())
    run(tmp_path, Alerts(command=str(script), kinds=("warning", "stop")), Warns())
    assert (tmp_path / "told").read_text().split() == ["alert", "stop", "warning", "stop"]
