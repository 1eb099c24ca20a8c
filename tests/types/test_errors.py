import pytest
import torch

from lit_grpo.types.errors import as_rank_lost

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
