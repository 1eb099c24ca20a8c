"""Operations and bytes of the passes of a step, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from setups import ATTENTION, BODY, HEAD, LOGITS, PAIRS, SIZES, TOKENS, adapted, make

from lit_grpo.cli.estimate.model_sizes import OptimizerSizes
from lit_grpo.cli.estimate.step import step_sizes
from lit_grpo.cli.estimate.work import decode_work, forward_work, tokens_of, update_work
from lit_grpo.training import UpdateConfig


def test_a_pass_reads_each_prompt_once_if_rows_share_it():
    assert (tokens_of(make()).model, tokens_of(make()).head) == (TOKENS, HEAD)
    assert tokens_of(make()).pairs == PAIRS
    step = step_sizes([6, 6], 10, group_size=2, update=UpdateConfig(), packed=False)
    padded = tokens_of(make(step=step))
    assert (padded.model, padded.pairs) == (4 * 16, 4 * 16 * 16 / 2)


def test_micro_batches_follow_the_budget_and_the_mean_lengths():
    assert tokens_of(make(update=UpdateConfig(max_tokens_per_micro_batch=26))).micro_batches == 2
    update = UpdateConfig(minibatches=2, max_tokens_per_micro_batch=26)
    step = step_sizes([6, 6], 10, group_size=2, update=update, mean_completion_tokens=2)
    assert tokens_of(make(step=step)).micro_batches == 2
    assert tokens_of(make(step=step)).model == 2 * 6 + 4 * 2


def test_a_forward_pass_has_body_head_and_attention():
    work = forward_work(make())
    assert (work.flops, work.attention) == (BODY + LOGITS, ATTENTION)
    assert work.layers == 2
    values = 4 * 4 * 84 * 2 * TOKENS  # touches, bytes, values of a layer, layers
    logits = 8 * 4 * 100 * HEAD
    assert work.bytes == values + logits + 4 * 1000


def test_a_sampled_token_moves_its_keys_logits_and_values():
    token = decode_work(make(), 1, 1, 0, dtype=0).bytes
    assert token == 4 * 32 * (6 + 1 / 2) + 10 * 4 * 100 + 4 * 4 * 84 * 2


def test_sampling_reads_no_embeddings_that_are_only_looked_up():
    def read(**changes) -> float:
        setup = make(model=replace(SIZES, vocab_size=25, **changes))
        return decode_work(setup, 0, 0, 1, dtype=0).bytes

    # 400 parameters are outside of the layers, of which the head has 200.
    assert (read(), read(layer_parameters=400)) == (4 * 800, 4 * 1000)


@pytest.mark.parametrize(
    ("settings", "body", "head", "attention"),
    [
        ({}, 3, 3, 3),
        ({"checkpointing": True}, 3.75, 3, 4),
        ({"model": adapted()}, 2.1, 2, 3),  # no gradients of nine tenths of the weights
    ],
)
def test_an_update_has_a_forward_and_two_backward_passes(settings, body, head, attention):
    work = update_work(make(**settings))
    assert work.flops == pytest.approx(body * BODY + head * LOGITS)
    assert work.attention == attention * ATTENTION


def test_a_head_in_chunks_runs_once_more():
    model = replace(SIZES, vocab_size=2**22)
    assert update_work(make(model=model)).flops == 3 * BODY + 4 * 2 * 8 * 2**22 * HEAD


def test_a_plain_adamw_moves_more_than_a_fused_one():
    def moved(*, copies: bool) -> float:
        sizes = OptimizerSizes(state_bytes=8000, copies=copies)
        return update_work(make(optimizer=sizes)).bytes

    assert moved(copies=True) - moved(copies=False) == (80 - 28) * 1000
