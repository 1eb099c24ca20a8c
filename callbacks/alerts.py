"""Tell somebody about the events of a run, by a command or a webhook."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_grpo.runs.files.events import Event, EventKind
from lit_grpo.types import UserError
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0


@checks_keywords
@checks_types
class Alerts(Callback):
    """Send the events of a run to a command or a webhook.

    They are sent in a thread of their own; at its end the run waits 10 seconds for alerts that are
    under way. An alert that cannot be sent is logged, and the run continues.

    Args:
        command: Program with arguments, as one text or a list, run without a shell. It reads the
            message on its standard input, and finds what it is about in the environment variables
            ``LIT_GRPO_RUN``, ``LIT_GRPO_KIND``, ``LIT_GRPO_STEP`` and ``LIT_GRPO_CAUSE``.
        webhook: URL that gets a JSON object with ``text``, as Slack and Mattermost read it, and
            ``run``, ``kind``, ``step``, ``cause``, ``message`` and ``time``.
        kinds: Kinds of events to send.

    Raises:
        UserError: neither a command nor a webhook is given, or there is no such program.
    """

    def __init__(
        self,
        command: str | list[str] | None = None,
        webhook: str | None = None,
        kinds: tuple[EventKind, ...] = ("alert", "rollback", "stall", "stop", "crash"),
    ) -> None:
        if not command and not webhook:
            raise UserError(
                "Alerts must have a command or a webhook to send to. Set command or webhook of "
                "Alerts.init_args."
            )
        if webhook and not webhook.startswith(("http://", "https://")):
            raise UserError(
                f"Alerts.init_args.webhook must be a URL with http:// or https://, got {webhook!r}."
            )
        try:
            self._words = shlex.split(command) if isinstance(command, str) else list(command or [])
        except ValueError as error:
            raise UserError(
                "Alerts.init_args.command must be words as a shell reads them, got "
                f"{command!r} ({error}). Close the quotation, or give a list of words."
            ) from error
        if self._words and shutil.which(self._words[0]) is None:
            raise UserError(
                "Alerts.init_args.command must begin with a program that exists and may be "
                f"executed, got {self._words[0]!r} (alerts would be lost). Set its path, or use a "
                "shell: [sh, -c, '...']."
            )
        self.command = command
        self.webhook = webhook
        self.kinds = kinds
        self._pool = ThreadPoolExecutor(1, "alerts")

    def on_event(self, trainer: L.Trainer, event: Event) -> None:
        """Send an event, and wait for it if it is the last one."""
        if event.kind not in self.kinds:
            return
        run = os.path.abspath(trainer.default_root_dir)
        sending = self._pool.submit(self._send, run, event)
        if event.kind in ("stop", "crash", "done"):
            wait([sending], TIMEOUT_SECONDS)

    def _send(self, run: str, event: Event) -> None:
        steps = f"{event.step} rollout step{'' if event.step == 1 else 's'}"
        text = f"{run}, after {steps}: {event.kind}. {event.message}".rstrip(". ") + "."
        for send in (self._run_command, self._post):
            try:
                send(run, event, text)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                log.warning("an alert could not be sent: %s", error)

    def _run_command(self, run: str, event: Event, text: str) -> None:
        if not self.command:
            return
        values = {"RUN": run, "KIND": event.kind, "STEP": str(event.step), "CAUSE": event.cause}
        subprocess.run(
            self._words,
            input=text,
            text=True,
            env=os.environ | {f"LIT_GRPO_{name}": value for name, value in values.items()},
            timeout=TIMEOUT_SECONDS,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def _post(self, run: str, event: Event, text: str) -> None:
        if not self.webhook:
            return
        body = json.dumps({"text": text, "run": run} | asdict(event)).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.webhook, body, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            pass
