"""Trainings of two ranks with a preset: `main` runs those that ``PRESET/STRATEGY...`` names.

Each rank saves what it has of a run as ``PRESET-STRATEGY-rankN.pt`` in the working directory,
where the teacher is, too.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import yaml
from ddp_trainings import fit_ranks
from jsonargparse import ArgumentParser
from sharded_cases import SHALLOW, TEACHER
from sharded_trainings import STRATEGIES
from small_runs import PROMPTS, Keep, ShareOfLowBytes, make_module

from lit_grpo.distributed.ranks import get_rank
from lit_grpo.objective import AdvantageConfig, Objective
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.rewards import Reward
from lit_grpo.rollout import Sampling

NUM_STEPS = 2
UPDATES_OF_A_STEP = 2
HIGH_TARGET = 10.0
"""A target that the entropy is below, so that the bonus of `skywork_or1` is there."""
SAMPLING = Sampling(max_tokens=8, temperature=0.2, stop_token_ids=tuple(range(40)))
"""At this temperature ratios leave the bounds that presets set."""


class ShareOfEvenBytes(Reward):
    """A second reward, for presets that combine several."""

    def score(self, prompt, completion):
        return sum(token % 2 == 0 for token in completion.token_ids) / len(completion.token_ids)


@cache
def new_parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--objective", type=Objective)
    parser.add_argument("--advantage", type=AdvantageConfig)
    parser.add_argument("--dynamic_sampling_rounds", type=int, default=0)
    return parser


@cache
def settings_of(preset: str) -> dict[str, Any]:
    """Return what a preset sets of the module."""
    parser = new_parser()
    text = (files("lit_grpo.configs") / "presets" / f"{preset}.yaml").read_text()
    config = parser.parse_object(yaml.safe_load(text)["model"])
    if config.objective.entropy.target is not None:
        config.objective.entropy.target = HIGH_TARGET
    return vars(parser.instantiate_classes(config))


def train(preset: str, strategy: str) -> dict[str, Any]:
    settings = settings_of(preset)
    distills = settings["objective"].distillation.coef > 0
    module, keep = (
        make_module(
            rewards=[ShareOfLowBytes(), ShareOfEvenBytes()],
            sampling=SAMPLING,
            policy=SHALLOW,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.2, momentum=0.5),
            update={
                "max_tokens_per_micro_batch": 40,
                "max_grad_norm": 1.0,
                "minibatches": UPDATES_OF_A_STEP,
            },
            teacher=TEACHER if distills else None,
            **settings,
        ),
        Keep(),
    )
    fit_ranks(
        module,
        PROMPTS,
        4,
        keep,
        max_steps=NUM_STEPS * UPDATES_OF_A_STEP,
        trainer_settings={"strategy": STRATEGIES[strategy](), "devices": 2},
    )
    return {
        "weights": {name: one.clone() for name, one in named_weights(module.policy.model)},
        "metrics": [output["metrics"] for output in keep.outputs],
    }


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        preset, _, strategy = name.partition("/")
        torch.save(train(preset, strategy), f"{preset}-{strategy}-rank{get_rank()}.pt")
