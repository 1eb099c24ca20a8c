import pytest
import torch

from lit_grpo.runs.progress.activity import GIB, CPUMeter, describe_activity, select_gpu


class NVMLError(Exception):
    """Of pynvml, which has no base class but Exception."""


@pytest.fixture
def gpu(monkeypatch):
    """Return the calls to a GPU that cannot tell how busy it is."""
    calls = []

    def utilization():
        calls.append("utilization")
        raise NVMLError("Not Supported")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    return calls


def test_a_gpu_that_cannot_tell_how_busy_it_is_ends_no_watchdog(gpu):
    described = describe_activity(CPUMeter())
    assert gpu == ["utilization"]
    assert "of the GPU; " not in described.replace("of the GPU in use", "")
    assert "60.0 of 80.0 GiB of the GPU in use" in described


def test_a_thread_asks_about_the_gpu_of_its_process(gpu):
    select_gpu(torch.device("cpu"))
    assert gpu == []
    select_gpu(torch.device("cuda", 3))
    assert gpu == [torch.device("cuda", 3)]
