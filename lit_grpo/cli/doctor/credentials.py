"""Check the access to judges, the Hub and wandb, and the answers of judges."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import get_token
from lightning.pytorch.loggers import WandbLogger

from lit_grpo.cli.built_run import BuiltRun, NotChecked
from lit_grpo.cli.doctor.findings import Finding, State, finding_of, ok, refused, remark
from lit_grpo.cli.errors import reworded
from lit_grpo.cli.parsing.environment import log_overridden
from lit_grpo.cli.rewards.judge_check import PASSED, address_of, verdict_on
from lit_grpo.judge.connection import connect
from lit_grpo.policy.files.source_checks import is_hub_id
from lit_grpo.rewards import JudgedReward, ProcessReward, Reward
from lit_grpo.types import UserError

WANDB_URL = "https://api.wandb.ai"
WITHOUT_LOGIN = ("offline", "disabled", "dryrun")
"""Values of WANDB_MODE with which wandb contacts no server."""


def check_credentials(run: BuiltRun) -> Iterator[Finding]:
    """Check that the variables of judges are set, and that the Hub and wandb can be accessed."""
    log_overridden(run.cli.overridden)
    for judged in run.judged:
        yield _connect(judged)
    for reward in run.started:
        yield _start(reward, run)
    path = run.module.policy.path
    if path is not None and is_hub_id(path):
        has = "with the token of this machine" if get_token() else "without a token (HF_TOKEN)"
        yield ok(f"The Hub is asked for {path} {has}.")
    loggers = [one for one in run.trainer.loggers if isinstance(one, WandbLogger)]
    if loggers:
        yield _wandb(loggers[0])
    elif not (run.judged or run.started):
        yield ok("No reward asks a judge, and nothing is logged to wandb.")


def _connect(reward: JudgedReward) -> Finding:
    try:
        connect(reward.judge)  # needs the network for nothing yet
    except UserError as error:
        return refused(str(error))
    return ok(f"{reward.name}: {address_of(reward.judge)}")


def _start(reward: Reward, run: BuiltRun) -> Finding:
    """Start a reward where the run does, which finds a variable that its ``start`` lacks."""
    if not run.may_start(reward):
        return remark(f"{reward.name}: not started (--offline).")
    try:
        run.start_of(reward).read()
    except Exception as error:  # of the user's code
        return finding_of(error, is_offline=run.is_offline)
    where = "this process"
    if isinstance(reward, ProcessReward):
        where = "a worker process, with the environment variables of this one"
    return ok(f"{reward.name} starts in {where}.{run.probe_advice}")


def _wandb(logger: Any) -> Finding:
    mode = os.environ.get("WANDB_MODE", "").lower()
    if logger._offline or mode in WITHOUT_LOGIN:
        return remark(
            f"wandb is {mode if mode == 'disabled' else 'offline'}: nothing is uploaded during the "
            "run. `wandb sync` uploads it later."
        )
    if has_wandb_login():
        return ok("wandb is online, and there is a login.")
    return refused(reworded("No API key configured"))


def has_wandb_login() -> bool:
    """Return whether there is a key where wandb looks for one, without asking its server."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB_URL)).netloc
    given = os.environ.get("NETRC")
    for path in [given] if given else ["~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(Path(path).expanduser()).authenticators(host):
                return True
    return False


def check_judges(run: BuiltRun) -> Iterator[Finding]:
    """Ask each judge about good and bad answers, like ``lit-grpo judge-check``."""
    direct = [one for one in run.rewards if isinstance(one, JudgedReward)]
    if not direct:
        return
    if run.is_offline:
        raise NotChecked(f"{len(direct)} judge(s) not asked (--offline).")
    for reward in direct:
        if _connect(reward).state is State.FAILED:  # `check_credentials` says why
            yield remark(f"{reward.name}: not asked, since its credentials are missing.")
            continue
        exit_code, verdict = verdict_on(reward, lambda: run.loader.get().some_prompts())
        say = ok if exit_code == PASSED else refused
        yield say(f"{reward.name}: {verdict}")
