"""An engine that samples during updates, and a callback that saves what it has sampled ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import torch
from transformers import AutoModelForCausalLM
from worker_processes import wait_until

from lit_grpo.policy.named_weights import named_weights
from lit_grpo.rollout import HFEngine, RolloutEngine


class OverlappingEngine(RolloutEngine):
    """Samples with a copy of the policy's weights, as a server would."""

    overlaps_updates = True

    def __init__(self):
        self.seeds = []
        """Of the generations that have begun."""
        self._ended = []
        self._sampler = HFEngine()

    @property
    def num_generations(self):
        return len(self.seeds)

    @property
    def num_ended(self):
        return len(self._ended)

    def load_weights(self, policy, version):
        if version == self.version:
            return
        with torch.random.fork_rng():
            # Its own config: the update switches the policy's to another attention meanwhile.
            model = AutoModelForCausalLM.from_config(copy.deepcopy(policy.model.config))
        model.load_state_dict(dict(named_weights(policy.model)))
        self._sampler = HFEngine()
        self._sampler.load_weights(
            SimpleNamespace(model=model, tokenizer=policy.tokenizer, source=None), version
        )
        self.version = version

    def generate(self, prompts, group_size, sampling, *, seed):
        self.seeds.append(seed)
        yield from self._sampler.generate(prompts, group_size, sampling, seed=seed)
        self._ended.append(seed)


class SaveAhead(L.Callback):
    """Save a checkpoint after a rollout step, as soon as so much has been sampled ahead.

    Args:
        is_sampled: Whether all that is to be saved is sampled.
    """

    def __init__(self, path: Path, step: int, is_sampled: Callable[[], bool]) -> None:
        self.path = path
        self.step = step
        self.is_sampled = is_sampled

    def on_train_batch_end(self, trainer, pl_module, *_):
        if pl_module.rollout_step == self.step:
            wait_until(lambda: self.is_sampled() and not pl_module.rewards.num_unscored(), 60)
            trainer.save_checkpoint(self.path)
