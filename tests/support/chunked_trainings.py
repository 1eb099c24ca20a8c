"""Trainings of `sharded_trainings` whose heads run in chunks, different numbers on each rank.

``rounded/STRATEGY`` takes one step that computes in bfloat16, on weights and masters in float32.
"""

from __future__ import annotations

import sys
from typing import Any

import sharded_trainings
import torch
from ddp_trainings import fit_ranks
from sharded_cases import CASES, TIED
from small_runs import PROMPTS, Keep, make_module

from lit_grpo.distributed.ranks import get_rank
from lit_grpo.objective import EntropyTerm, Objective
from lit_grpo.policy import LoRA, logprobs
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.training import MasterAdamW

CHUNK_TOKENS = 4
UPDATE = {"max_tokens_per_micro_batch": 20}
CHUNKED = {
    "chunks": {
        "update": UPDATE,
        "objective": Objective(entropy=EntropyTerm(coef=0.01)),
        "policy": {"architecture": TIED},
    },
    "chunks, mixed": {"update": UPDATE, "precision": "bf16-mixed"},
    "chunks, trained head": {
        "update": UPDATE,
        "policy": {"lora": LoRA(rank=4, modules_to_save=["lm_head"])},
    },
    "chunks, adapted head": {
        "update": UPDATE,
        "policy": {"lora": LoRA(rank=4, target_modules=["q_proj", "lm_head"])},
    },
}
ROUNDED = "rounded"
"""Directory of a policy in bfloat16."""


def rounded(strategy: str) -> dict[str, Any]:
    is_ddp = strategy == "ddp"
    adam = MasterAdamW if is_ddp else torch.optim.AdamW
    module = make_module(
        policy={
            "path": ROUNDED,
            "architecture": None,
            "dtype": "bfloat16" if is_ddp else "float32",
        },
        update={"max_tokens_per_micro_batch": 25},
        # As good as linear in the gradient.
        optimizer=lambda params: adam(params, lr=1.0, eps=100.0, weight_decay=0.0),
    )
    trainer = fit_ranks(
        module,
        PROMPTS,
        4,
        keep := Keep(),
        trainer_settings={
            "strategy": sharded_trainings.STRATEGIES[strategy](),
            "devices": 2,
            "precision": "32-true" if is_ddp else "bf16-mixed",
        },
    )
    if is_ddp:
        states = trainer.optimizers[0].state
        named = [(n, states[p]["master"]) for n, p in module.policy.model.named_parameters()]
    else:
        named = [(name, one.clone()) for name, one in named_weights(module.policy.model)]
    (output,) = keep.outputs
    completions = output["rollouts"].completions
    return {
        "weights": dict(named),
        "metrics": output["metrics"],
        "sampled": [(one.token_ids, one.sampler_logprobs) for one in completions],
        "old_logprobs": output["batch"].old_logprobs,
    }


def main() -> None:
    CASES.update(CHUNKED)
    names = [name for name in sys.argv[2:] if name.startswith(ROUNDED)]
    for name in names:
        sys.argv.remove(name)
        strategy = name.partition("/")[2]
        torch.save(rounded(strategy), f"{ROUNDED}-{strategy}-rank{get_rank()}.pt")
    run_head = logprobs._run_head
    logprobs._run_head = lambda function, model, tokens, size, hidden_states: run_head(
        function, model, tokens, CHUNK_TOKENS, hidden_states
    )
    sharded_trainings.main()
