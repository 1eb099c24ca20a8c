import torch

from lit_grpo.policy.padding import pad


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    ids, mask = pad([[1], [2, 3]], 0, torch.long, left=True)
    assert ids.tolist() == [[0, 1], [2, 3]]
    assert mask.tolist() == [[False, True], [True, True]]
    ids, mask = pad([[1], [2, 3]], 9, torch.long)
    assert ids.tolist() == [[1, 9], [2, 3]]
    assert mask.tolist() == [[True, False], [True, True]]
