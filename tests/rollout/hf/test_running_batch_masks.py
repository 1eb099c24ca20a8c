import pytest
import torch
from tiny import LLAMA, tiny_policy

from lit_grpo.rollout.hf.running_batch import RunningBatch, _takes, can_prepare_masks

PROMPTS = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8]])
TOKENS = torch.tensor([[6, 7, 8, 9], [7, 6, 9, 8], [3, 4, 5, 6]])
WINDOWS = LLAMA | {"model_type": "gemma2", "head_dim": 8, "sliding_window": 4}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
ALIBI = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4}


@torch.no_grad()
def logits_and_masks(model, *, prepares_masks):
    """Return the logits after each token, and the dimensions of the masks of new tokens."""
    dimensions = []

    def look(module, args, kwargs):
        if kwargs["input_ids"].shape[1] == 1:
            dimensions.append(kwargs["attention_mask"].dim())

    model.eval()
    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    noise = torch.zeros(4, len(TOKENS))
    batch = RunningBatch(model, PROMPTS, PROMPTS > 0, 2, noise, prepares_masks=prepares_masks)
    logits = []
    for tokens in TOKENS:
        batch.advance(tokens, None)
        logits.append(batch.logits)
    handle.remove()
    return torch.stack(logits), dimensions


@pytest.mark.parametrize(
    ("architecture", "num_dimensions"),
    [(LLAMA, 4), (GPT2, 4), (WINDOWS, 2)],
    ids=["llama", "gpt2", "windows"],
)
def test_prepared_masks_change_no_logit(architecture, num_dimensions):
    """Layers with sliding windows see fewer tokens than a mask of all of them allows."""
    model = tiny_policy(architecture=architecture).model
    expected, plain = logits_and_masks(model, prepares_masks=False)
    found, prepared = logits_and_masks(model, prepares_masks=True)
    assert torch.equal(found, expected)
    assert plain == [2] * len(TOKENS)
    assert prepared == [num_dimensions] * len(TOKENS)


@pytest.mark.parametrize(
    ("architecture", "takes"), [(LLAMA, True), (ALIBI, False)], ids=["llama", "alibi"]
)
def test_a_model_is_tried_before_it_gets_prepared_masks(architecture, takes):
    """A model with ALiBi computes distances from the mask of all tokens."""
    model = tiny_policy(architecture=architecture).model
    assert _takes(model, "prepares_masks", "the host waits") == takes
    assert not can_prepare_masks(model)  # nothing waits on a CPU
