"""Trainings by optimizers with states of 8 bits: `main` runs those of ``RANKS NAME/STRATEGY ...``.

Rank 0 saves the weights after four steps, those of a run that was resumed after two, and what the
states are, as ``NAME-STRATEGY.pt`` in the working directory; or the error that refused it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from ddp_trainings import fit_ranks
from sharded_trainings import STRATEGIES, optimizer_values
from small_runs import PROMPTS, make_module

from lit_grpo.callbacks import Checkpoints
from lit_grpo.distributed.ranks import get_rank
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.training import GRPOModule
from lit_grpo.types import UserError

LARGER = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
"""Weights of 4,096 values and more, from which on torchao keeps 8 bits."""
NUM_STEPS = 4


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def torchao(parameters: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-3, block_size=64)


def bitsandbytes(parameters: Any) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-3, min_8bit_size=64)


OPTIMIZERS = {one.__name__: one for one in (adamw, torchao, bitsandbytes)}


def train(name: str, strategy: str, num_ranks: int) -> dict[str, Any]:
    def run(steps: int, directory: str, ckpt_path: str | None = None) -> GRPOModule:
        module = make_module(
            optimizer=OPTIMIZERS[name],
            update={"max_tokens_per_micro_batch": 25, "max_grad_norm": 1.0},
            policy={"architecture": LARGER},
        )
        fit_ranks(
            module,
            PROMPTS,
            4,
            Checkpoints(dirpath=directory, every_n_steps=2, keep_last=9),
            max_steps=steps,
            ckpt_path=ckpt_path,
            trainer_settings={"strategy": STRATEGIES[strategy](), "devices": num_ranks},
        )
        return module

    whole = run(NUM_STEPS, f"{name}-{strategy}")
    resumed = run(NUM_STEPS, "resumed", f"{name}-{strategy}/step_000002.ckpt")
    return {
        "weights": {name: one.clone() for name, one in named_weights(whole.policy.model)},
        "resumed": {name: one.clone() for name, one in named_weights(resumed.policy.model)},
        "states": {f"{type(one).__name__} {one.dtype}" for one in optimizer_values(whole)},
    }


def main() -> None:
    torch.set_num_threads(1)
    for one in sys.argv[2:]:
        name, strategy = one.split("/")
        try:
            result = train(name, strategy, int(sys.argv[1]))
        except UserError as error:  # on every rank
            result = {"error": str(error)}
        if get_rank() == 0:
            torch.save(result, f"{name}-{strategy}.pt")
