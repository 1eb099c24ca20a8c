import io
import sys

import pytest
import torch

from lit_grpo.types.errors import as_rank_lost, keeping_interrupts

GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError(
                f"{GLOO}pair.cc:553] Connection closed by peer [10.77.0.2]:15497. This is "
                "typically caused by a remote worker crashing. Check the logs"
            ),
            "Connection closed by peer [10.77.0.2]:15497. Unless",
        ),
        (
            RuntimeError(f"{GLOO}unbound_buffer.cc:84] Timed out waiting 20000ms for recv"),
            "Timed out waiting 20000ms for recv (the timeout of trainer.strategy). Unless",
        ),
        (
            torch.distributed.DistBackendError("NCCL error\nncclRemoteError: A call failed.\nLast"),
            "ncclRemoteError: A call failed. Unless",
        ),
        (
            torch.distributed.DistNetworkError("Failed to recv, got 0 bytes\nframe #0"),
            "Failed to recv, got 0 bytes. Unless",
        ),
    ],
    ids=["closed", "timeout", "nccl", "store"],
)
def test_an_error_of_a_collective_operation_says_that_another_process_is_gone(error, said):
    lost = as_rank_lost(error)
    assert f"has ended or does not answer: {said} it was killed" in str(lost)
    assert as_rank_lost(lost) is lost


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Connection closed by peer"),
        ConnectionError(f"{GLOO}pair.cc:553] Connection closed by peer"),
        torch.distributed.DistBackendError("NCCL error: ncclInvalidUsage"),
    ],
    ids=["no-collective", "no-runtime-error", "wrong-use"],
)
def test_other_errors_are_not_taken_for_a_lost_process(error):
    assert as_rank_lost(error) is None


class Interrupted(io.BytesIO):
    """A file whose writer gets Ctrl-C."""

    def write(self, data):
        if self.tell() > 1000:
            raise KeyboardInterrupt
        return super().write(data)


def save():
    torch.save({str(number): torch.zeros(100) for number in range(10)}, Interrupted())


def test_ctrl_c_while_a_file_is_written_stays_one():
    with pytest.raises(RuntimeError, match="unexpected pos"):
        save()
    with pytest.raises(KeyboardInterrupt), keeping_interrupts():
        save()


def leave():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        sys.exit(1)  # as Lightning does


def test_ctrl_c_that_lightning_has_replaced_is_raised_again():
    with pytest.raises(KeyboardInterrupt), keeping_interrupts():
        leave()


def test_other_errors_pass():
    for error in (ValueError("a"), SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, keeping_interrupts():
            raise error
        assert caught.value is error or isinstance(error, KeyboardInterrupt)
