import pytest
import torch

from lit_grpo.diagnostics.memory import describe_out_of_memory, is_out_of_memory


@pytest.fixture(scope="module")
def host_error():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**48)
    return caught.value


def test_a_lack_of_memory_is_told_from_other_errors(host_error):
    assert is_out_of_memory(host_error)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


def test_the_stage_names_the_setting_to_lower(host_error):
    line = describe_out_of_memory("micro_batch", host_error)
    start = "out of memory in the stage micro_batch. 1,125,899,906.8 MB were asked for."
    assert line.startswith(start)
    assert "Lower model.update.max_tokens_per_micro_batch" in line
    assert "max_concurrent" in describe_out_of_memory("generation", MemoryError())
    elsewhere = describe_out_of_memory("", MemoryError())
    assert elsewhere.startswith("out of memory outside of the stages of a step. Set model.policy.")


def test_the_words_of_a_gpu_are_kept_without_those_on_fragmentation():
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
        "of which 1.00 GiB is free. If reserved but unallocated memory is large try setting X."
    )
    line = describe_out_of_memory("micro_batch", error)
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB" in line
    assert "If reserved" not in line
