"""TRL's own loss of a micro-batch, for an `Objective` that TRL supports."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loss_batches import MAX_TOKENS, Case, Gradient, differentiate
from torch import Tensor

from lit_grpo.objective import Objective, SamplerCorrection


def trl_trainer(
    loss_type: str, objective: Objective, *, accumulation: int = 1, num_processes: int = 1
) -> SimpleNamespace:
    """Build the parts of a `GRPOTrainer` that its loss reads."""
    module = pytest.importorskip(
        "trl.trainer.grpo_trainer",
        reason="TRL comes with the dev extra",
    )
    kl, entropy, correction = objective.kl, objective.entropy, objective.sampler_correction
    trainer = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level=objective.ratio,
        epsilon_low=objective.clip_low,
        epsilon_high=objective.clip_high + (loss_type == "cispo"),
        beta=kl.coef,
        top_entropy_quantile=objective.top_entropy_fraction,
        off_policy_mask_threshold=objective.off_policy_threshold,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=correction is not None,
        max_completion_length=MAX_TOKENS,
        current_gradient_accumulation_steps=accumulation,
        aux_loss_enabled=False,
        entropy_coef=entropy.coef,
        use_adaptive_entropy=entropy.target is not None,
        _entropy_bonus_enabled=entropy.coef != 0 or entropy.target is not None,
        _last_world_entropy=float("inf"),
        _entropy_window_stats=None,
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=num_processes,
            sync_gradients=True,
            gather=lambda tensor: tensor,
            reduce=lambda tensor, reduction: tensor,
            pad_across_processes=lambda tensor, dim, pad_index: tensor,
        ),
        args=SimpleNamespace(
            delta=objective.ratio_cap,
            use_bias_correction_kl=kl.importance,
            sapo_temperature_pos=objective.sapo_temperatures[0],
            sapo_temperature_neg=objective.sapo_temperatures[1],
            vespo_k_pos=objective.vespo_positive[0],
            vespo_lambda_pos=objective.vespo_positive[1],
            vespo_k_neg=objective.vespo_negative[0],
            vespo_lambda_neg=objective.vespo_negative[1],
            steps_per_generation=accumulation,
            entropy_target=entropy.target,
            entropy_coef_delta=entropy.coef_step,
            entropy_coef_min=entropy.coef_min,
            entropy_coef_max=entropy.coef_max,
        ),
        get_off_policy_mask=module.GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=module.GRPOTrainer.get_gamma_weights,
        compute_loss=module.GRPOTrainer._compute_loss,
    )
    trainer.get_high_entropy_mask = partial(module.GRPOTrainer.get_high_entropy_mask, trainer)
    return trainer


def sampler_ratio(case: Case, correction: SamplerCorrection) -> Tensor:
    """Compute the importance weights against vLLM, as TRL does before its loss."""
    batch = case.batch
    old = case.logprobs if batch.old_logprobs is None else batch.old_logprobs
    difference = torch.where(batch.loss_mask, old - batch.sampler_logprobs, 0.0)
    if correction.level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    low, high = correction.min_ratio, correction.max_ratio
    if correction.outside == "truncate":
        return ratio.clamp(min=low, max=high)
    outside = (ratio < (low or -1)) | (ratio > (high or float("inf")))
    return ratio.masked_fill(outside, 0.0)


def trl_gradient(
    trainer: SimpleNamespace, case: Case, objective: Objective, *, num_items: int
) -> Gradient:
    """Differentiate TRL's loss; ``num_items`` counts the tokens of all its processes."""
    batch = case.batch
    inputs: dict[str, Any] = {
        "prompt_ids": batch.prompt_ids[batch.prompt_index],
        "prompt_mask": batch.prompt_mask[batch.prompt_index].long(),
        "completion_ids": batch.completion_ids,
        "completion_mask": batch.loss_mask.long(),
        "advantages": batch.advantages,
        "sampling_per_token_logps": batch.sampler_logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
        "num_items_in_batch": torch.tensor(num_items),
    }
    if batch.old_logprobs is not None:
        inputs["old_per_token_logps"] = batch.old_logprobs
    if objective.sampler_correction is not None:
        inputs["importance_sampling_ratio"] = sampler_ratio(case, objective.sampler_correction)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropy, None)
        return trainer.compute_loss(trainer, None, inputs)

    return differentiate(case, loss)
