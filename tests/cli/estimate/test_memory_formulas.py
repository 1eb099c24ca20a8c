"""Estimated bytes, by hand for a model of small round sizes."""

from __future__ import annotations

from dataclasses import replace

from setups import SIZES, UNIT, adapted, make

from lit_grpo.cli.estimate import memory_formulas as formulas
from lit_grpo.cli.estimate.model_sizes import OptimizerSizes
from lit_grpo.cli.estimate.setup import Sampler
from lit_grpo.cli.estimate.sharding import SHARDINGS
from lit_grpo.cli.estimate.step import step_sizes
from lit_grpo.training import UpdateConfig

TOKENS = 2 * 6 + 4 * 10
ROWS = 4 * 16


def test_a_layer_keeps_its_values_and_the_keys_of_every_row():
    layer = 4 * (84 * TOKENS + 16 * ROWS)
    assert formulas.layer_bytes(make()) == layer
    assert formulas.kept_bytes(make()) == 2 * layer
    half = make(model=replace(SIZES, parameter_bytes=2, trained_bytes=2), compiles=True)
    assert formulas.layer_bytes(half) == layer / 2
    mixed = make(precision="bf16-mixed", compiles=True)
    assert formulas.layer_bytes(mixed) == layer * 3 / 4


def test_merged_attention_keeps_each_key_once_and_has_no_masks():
    merged = make(model=replace(SIZES, parameter_bytes=2, trained_bytes=2))
    assert merged.merges_attention
    assert formulas.layer_bytes(merged) == 2 * (84 + 16) * TOKENS
    assert formulas.mask_bytes(merged) == 0
    capped = replace(SIZES, parameter_bytes=2, trained_bytes=2, caps_scores=True)
    for other in (make(), make(model=capped), make(precision="bf16-mixed", compiles=True)):
        assert not other.merges_attention
        assert formulas.mask_bytes(other) > 0


def test_sampling_keeps_the_copies_that_autocast_makes():
    assert formulas.sampling_cast_bytes(make(precision="bf16-mixed")) == 2 * SIZES.parameters
    assert formulas.sampling_cast_bytes(make("fsdp2", 2, precision="bf16-mixed")) == 0
    assert formulas.sampling_cast_bytes(make()) == 0


def test_a_cpu_samples_in_float32_with_copies_of_the_large_linear_layers():
    large = replace(SIZES, large_linear_parameters=300)
    long = {"step": step_sizes([6, 6], 32, num_ranks=1, group_size=2, update=UpdateConfig())}
    on_cpu = {"device": UNIT} | long
    assert formulas.blocked_bytes(make(model=large, **on_cpu)) == 4 * 300
    assert formulas.blocked_bytes(make(model=large, **long)) == 0  # a GPU
    assert formulas.blocked_bytes(make(model=large, device=UNIT)) == 0  # few tokens
    assert formulas.blocked_bytes(make(model=large, precision="bf16-mixed", **on_cpu)) == 0
    assert formulas.blocked_bytes(make(model=replace(large, parameter_bytes=2), **on_cpu)) == 0


def test_checkpointing_keeps_inputs_and_recomputes_one_layer():
    gradients = 4 * (20 + 8) * TOKENS
    assert formulas.backward_bytes(make()) == gradients
    checkpointed = make(checkpointing=True)
    assert formulas.kept_bytes(checkpointed) == 4 * 2 * 8 * TOKENS
    assert formulas.backward_bytes(checkpointed) == gradients + formulas.layer_bytes(make())


def test_an_adapter_on_a_bfloat16_base_reads_a_copy_in_float32():
    base = adapted(parameter_bytes=2.1)
    plain = replace(base, adapted_values=0)
    assert formulas.layer_bytes(make(model=base)) - formulas.layer_bytes(make(model=plain)) == (
        4 * 30 * TOKENS
    )


def test_a_mask_has_a_number_for_each_query_and_key_of_a_row_that_shares_its_prompt():
    mask = 2 * 10 * 16 * 2  # rows, queries, keys, query heads of a key head
    assert formulas.mask_bytes(make(checkpointing=True)) == mask * 4
    assert formulas.mask_bytes(make()) == mask * 4
    assert formulas.mask_bytes(make(compiles=True)) == mask * 4
    by_layer = make("deepspeed_stage_3", 2, compiles=True)
    once = formulas.mask_bytes(make("deepspeed_stage_3", 2))
    assert formulas.mask_bytes(by_layer) == once * by_layer.model.num_layers


def test_logits_exist_in_chunks():
    assert formulas.logit_bytes(make()) == 3 * 4 * 40 * 100
    large = make(model=replace(SIZES, vocab_size=2**22), precision="bf16-mixed")
    assert formulas.logit_bytes(large) == 3.5 * 4 * 2**26
    assert formulas.logit_bytes(make(device=UNIT)) == 4 * 40 * 100
    assert formulas.head_gradient_bytes(make()) == 4 * 800
    assert (
        formulas.head_gradient_bytes(large) == 2 * 2 * 8 * 2**22
    )  # that of a chunk, and their sum
    assert formulas.head_gradient_bytes(make(model=adapted())) == 0


def test_the_cache_has_keys_and_values_of_rows_that_are_sampled_together():
    assert formulas.cache_bytes(make()) == 32 * 4 * 16 * 4
    assert formulas.cache_bytes(make(sampler=Sampler(max_concurrent=2))) == 32 * 2 * 16 * 4


def test_on_a_cpu_rows_share_the_keys_and_values_of_long_prompts():
    long = step_sizes([2048, 6], 10, num_ranks=1, group_size=2, update=UpdateConfig())
    assert formulas.cache_bytes(make(device=UNIT, step=long)) == 32 * (2 * 2048 + 4 * 10) * 4
    assert formulas.cache_bytes(make(step=long)) == 32 * 4 * 2058 * 4
    few = Sampler(max_concurrent=1)
    assert formulas.shares_prompts(make(device=UNIT, step=long, sampler=few))
    short = step_sizes([1023, 1], 10, num_ranks=1, group_size=2, update=UpdateConfig())
    assert not formulas.shares_prompts(make(device=UNIT, step=short))
    servers = Sampler(kind="servers")
    assert not formulas.shares_prompts(make(device=UNIT, step=long, sampler=servers))


def test_sampling_needs_logits_of_every_row():
    assert formulas.sampled_logit_bytes(make()) == 4 * 4 * 4 * 100
    assert formulas.sampled_logit_bytes(make(sampler=Sampler(sorts=True))) == 10 * 4 * 4 * 100


def test_prompts_are_read_some_at_a_time():
    assert formulas.read_prompt_bytes(make()) == 3 * 20 * 12 * 4
    lengths = [10_000] * 8  # of which a pass takes three
    long = step_sizes(lengths, 10, num_ranks=1, group_size=2, update=UpdateConfig())
    assert formulas.read_prompt_bytes(make(step=long)) == 3 * 20 * 30_000 * 4
    longer = step_sizes([40_000] * 8, 10, num_ranks=1, group_size=2, update=UpdateConfig())
    assert formulas.read_prompt_bytes(make(step=longer)) == 3 * 20 * 40_000 * 4


def test_two_layers_and_what_is_outside_of_them_are_gathered():
    gathered = formulas.gathered_layer_bytes(make("fsdp2", 4))
    assert gathered == 4 * (2 * 300 + 400) + 4 * 300
    assert formulas.gathered_layer_bytes(make("fsdp2", 4, precision="bf16-mixed")) == 2000 + 1200
    assert formulas.gathered_layer_bytes(make("fsdp2", 1)) == 0
    assert formulas.gathered_layer_bytes(make("deepspeed_stage_2", 4)) == 0
    # Autocast casts what stage 3 gathers in float32.
    mixed = make("deepspeed_stage_3", 4, precision="bf16-mixed")
    assert formulas.gathered_layer_bytes(mixed) == gathered
    kept = replace(SHARDINGS["fsdp2"], keeps_layers=True)
    assert formulas.gathered_layer_bytes(make("fsdp2", 4, sharding=kept)) == 4000 + 1200


def test_only_the_policy_s_own_sampling_gathers_the_whole_model():
    assert formulas.gathered_model_bytes(make("fsdp2", 4)) == 4000
    assert formulas.gathered_model_bytes(make("fsdp2", 4, sampler=Sampler(kind="servers"))) == 0


def test_autocast_keeps_copies_of_weights():
    assert formulas.cast_bytes(make(precision="bf16-mixed")) == 2000
    assert formulas.cast_bytes(make(precision="bf16-mixed", checkpointing=True)) == 1000
    assert formulas.cast_bytes(make("fsdp2", 2, precision="bf16-mixed")) == 0
    assert formulas.cast_bytes(make("deepspeed_stage_2", 2, precision="bf16-mixed")) == 2000
    assert formulas.cast_bytes(make()) == 0


def test_a_step_of_the_optimizer_copies_its_share_of_the_weights():
    copying = OptimizerSizes(state_bytes=8000, copies=True)
    assert formulas.optimizer_copy_bytes(make(optimizer=copying)) == 4000
    assert formulas.optimizer_copy_bytes(make("fsdp2", 4, optimizer=copying)) == 1000
    assert formulas.optimizer_copy_bytes(make()) == 0


def test_deepspeed_copies_its_part_of_the_gradients_for_a_step():
    copying = OptimizerSizes(state_bytes=8000, copies=True)
    for stage in (1, 2):  # which free them before the optimizer copies
        setup = make(f"deepspeed_stage_{stage}", 4, optimizer=copying)
        assert formulas.optimizer_copy_bytes(setup) == 1000
    third = make("deepspeed_stage_3", 4, optimizer=copying)
    assert formulas.optimizer_copy_bytes(third) == 2000
    small = replace(third, sharding=replace(third.sharding, step_values=10))
    assert formulas.optimizer_copy_bytes(small) == 80


def test_gradients_under_deepspeed_depend_on_whether_they_are_summed_over_micro_batches():
    update = UpdateConfig(max_tokens_per_micro_batch=26)
    assert formulas.gradient_bytes(make("deepspeed_stage_1", 4)) == 1000
    assert formulas.gradient_bytes(make("deepspeed_stage_1", 4, update=update)) == 4000
    assert formulas.gradient_bytes(make("deepspeed_stage_2", 4)) == 1000
    assert formulas.gradient_bytes(make("deepspeed_stage_2", 4, update=update)) == 2000
    assert formulas.gradient_bytes(make("deepspeed_stage_3", 4, update=update)) == 1000


def test_smaller_micro_batches_need_less():
    small = make(update=UpdateConfig(max_tokens_per_micro_batch=26))
    assert small.step.micro_batches == 2
    assert 2 * formulas.kept_bytes(small) == formulas.kept_bytes(make())
