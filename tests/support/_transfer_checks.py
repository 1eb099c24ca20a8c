"""Send weights to a real vLLM server, and write the results as JSON.

This is a program for the environment that has vLLM, run by `test_nccl_transfer_with_vllm`; one
server serves all checks.
"""

import copy
import json
import signal
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import vllm_without_nccl
from _vllm_checks import move, sampled
from paths import SUPPORT
from tiny import tiny_policy
from vllm_settings import ARCHITECTURE, ENV, FLAGS, MAX_MODEL_LEN
from vllm_without_nccl import StoreCommunicator

from lit_grpo.rollout import Launch, Sampling, Supervision, VLLMServerEngine, WeightCheck
from lit_grpo.rollout.vllm import nccl_transfer

HOT = Sampling(max_tokens=12, temperature=0.7)
NUM_SUCCESSFUL = 2
"""Broadcasts that succeed before the one that fails, which is in the middle of a fused layer."""
nccl_transfer.BUFFER_BYTES = 20_000


def open_engine(directory, fault, **settings):
    launch = Launch(
        program=[sys.executable, str(SUPPORT / "forked_vllm.py")],
        max_model_len=MAX_MODEL_LEN,
        flags=FLAGS | {"worker-extension-cls": f"{vllm_without_nccl.__name__}.Worker"},
        env=ENV | {"PYTHONPATH": str(SUPPORT), "BROADCAST_FAULT": str(fault)},
    )
    return VLLMServerEngine(
        weight_transfer="nccl",
        launch=launch,
        directory=str(directory),
        weight_check=WeightCheck(every=1),
        supervision=Supervision(health_interval=0.5, first_backoff=0.1),
        **settings,
    )


def send(engine, policy):
    """Change the policy and send it; return what the server samples then, and what happened."""
    move(policy)
    opened = StoreCommunicator.num_opened
    engine.load_weights(policy, engine.version + 1)
    return observe(engine, policy) | {"groups_opened": StoreCommunicator.num_opened - opened}


def observe(engine, policy):
    rows = sampled(engine, policy, HOT, HOT.temperature)
    observed = engine.observe()
    return rows | {
        "version": engine.version,
        "differences": list(observed.means["sampler/weight_check_difference"]),
        "restarts": observed.totals["rollout/restarts"],
    }


def check_restart(engine, policy):
    """Kill the server after the policy has changed, without sending the new weights."""
    sent = SimpleNamespace(model=copy.deepcopy(policy.model))
    move(policy)
    kill_server(engine)
    while engine.health():
        time.sleep(0.05)
    return observe(engine, sent)


def kill_server(engine):
    process = engine._supervisor.servers[0]._process
    psutil.Process(process.pid).send_signal(signal.SIGKILL)


def once(action):
    """Do something once in the sender, when a fused layer is half sent."""
    calls = count()

    def act_if_due():
        if next(calls) == NUM_SUCCESSFUL:
            action()

    StoreCommunicator.before_broadcast = act_if_due


def fail():
    raise RuntimeError("the sender's broadcast failed")


def check_hang(engine, policy):
    """Let the sender hang for longer than this program runs."""
    update = engine.api.update_weights
    engine.api.update_weights = lambda endpoint, weights, seconds: update(endpoint, weights, 10)
    once(lambda: time.sleep(3600))
    return send(engine, policy)


def main() -> None:
    directory = Path(sys.argv[2])
    fault = directory.parent / "fault"
    policy = tiny_policy(architecture=ARCHITECTURE)
    engine = open_engine(directory, fault)
    results = {}
    engine.start(policy)
    try:
        results["first"] = send(engine, policy)
        results["second"] = send(engine, policy)
        results["files"] = sorted(path.name for path in directory.iterdir())
        results["restarted"] = check_restart(engine, policy)
        once(fail)
        results["sender_failed"] = send(engine, policy)
        fault.write_text(str(NUM_SUCCESSFUL))
        results["server_failed"] = send(engine, policy)
        results["sender_hung"] = check_hang(engine, policy)
        results["at_last"] = send(engine, policy)
    finally:
        engine.close()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
