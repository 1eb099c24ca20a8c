import torch
from packed_batches import batch_of


def test_selected_rows_keep_their_prompts_and_are_trimmed_to_the_longest():
    batch = batch_of([1, 2, 3], [[4, 5, 6, 7], [8]], [9], [[5], [6, 7]])
    part = batch.select(torch.tensor([3, 2]))
    assert part.prompt_ids.tolist() == [[9]]
    assert part.prompt_index.tolist() == [0, 0]
    assert part.completion_ids.tolist() == [[6, 7], [5, 0]]
    assert part.completion_mask.tolist() == [[True, True], [True, False]]
    assert part.advantages.tolist() == batch.advantages[[3, 2]].tolist()
    assert part.old_logprobs is None
    assert part.surrogate_mask is part.loss_mask
    assert part.num_rows == 2


def test_a_batch_moves_to_a_device_with_all_its_tensors():
    moved = batch_of([1], [[2, 3]]).to("meta")
    assert moved.prompt_ids.device.type == moved.sampler_logprobs.device.type == "meta"
    assert moved.ref_logprobs is None
