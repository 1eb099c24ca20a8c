"""When weights can be sent by NCCL, and how its blocking calls are bounded."""

import asyncio
import socket
import threading
from importlib.util import find_spec

import pytest
from tiny import tiny_policy
from worker_processes import wait_until

from lit_grpo.policy import LoRA
from lit_grpo.rollout import VLLMServerEngine
from lit_grpo.rollout.server.endpoint import ServerError
from lit_grpo.rollout.vllm.nccl_transfer import _in_thread, _master_address


def test_a_transfer_without_full_weights_is_refused():
    policy = tiny_policy(lora=LoRA(rank=2))
    engine = VLLMServerEngine(weight_transfer="nccl")
    with pytest.raises(ValueError, match=r"only the adapter is sent.*weight_sync to full"):
        engine.start(policy)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
@pytest.mark.parametrize("settings", [{}, {"weight_sync": "full"}], ids=str)
def test_without_vllm_the_message_says_how_to_get_it(settings):
    policy = tiny_policy(lora=LoRA(rank=2) if settings else None)
    engine = VLLMServerEngine(weight_transfer="nccl", **settings)
    with pytest.raises(ValueError, match=r"pip install vllm\), or set .*weight_transfer"):
        engine.start(policy)


def test_group_and_server_meet_at_an_address_of_this_machine():
    address, port = _master_address("http://localhost:8000")
    assert address == "127.0.0.1"
    with socket.socket() as free:
        free.bind((address, port))


def test_a_call_that_hangs_is_a_server_error_and_its_late_result_is_undone():
    may_end, undone = threading.Event(), []

    def hang():
        may_end.wait(60)
        return "group"

    with pytest.raises(ServerError, match=r"the meeting: not done within 0\.05 s"):
        asyncio.run(_in_thread(hang, "the meeting", 0.05, undo=undone.append))
    may_end.set()
    wait_until(lambda: undone == ["group"])


@pytest.mark.parametrize("error", [RuntimeError("no"), TimeoutError("no")])
def test_a_call_that_fails_is_a_server_error(error):
    def fail():
        raise error

    with pytest.raises(ServerError, match=f"the meeting: {type(error).__name__}: no"):
        asyncio.run(_in_thread(fail, "the meeting", 10))
