"""What a run of GRPO keeps, so that it continues exactly: its state, its code and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lit_grpo.objective import AdvantageConfig, Objective
from lit_grpo.objective.custom import function_states, load_function_states
from lit_grpo.policy.files.model_source import ModelSource
from lit_grpo.policy.teacher import Teacher
from lit_grpo.rewards import ScorerReward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.training.batching import UpdateConfig
from lit_grpo.training.checks.resume_changes import CARRIED, HARMLESS, plain_settings
from lit_grpo.training.checks.user_code import (
    describe_function_code,
    describe_reward_code,
    function_of,
)
from lit_grpo.training.collecting.collector import Collector
from lit_grpo.training.evaluated_module import EvaluatedModule
from lit_grpo.training.optimizer.empty_steps import EmptySteps
from lit_grpo.training.optimizer.skipped_steps import SkippedSteps
from lit_grpo.training.update import PolicyUpdater
from lit_grpo.types.functions import carried_settings

SETTINGS = (
    "group_size",
    "sampling",
    "objective",
    "advantage",
    "update",
    "dynamic_sampling_rounds",
    "max_head_offpolicyness",
    "teacher",
)
"""Attributes that decide what is learned."""


class ResumableGRPO(EvaluatedModule):
    """The part of `GRPOModule` that is saved, restored and compared with an earlier run."""

    rewards: RewardSuite
    objective: Objective
    advantage: AdvantageConfig
    update: UpdateConfig
    teacher: Teacher | None
    collector: Collector
    policy_updater: PolicyUpdater
    rollout_step: int
    empty_steps: EmptySteps
    _reward_models: Mapping[str, ModelSource] = MappingProxyType({})

    def record_reward_models(self) -> None:
        """Record the files of the reward models, which have been loaded and checked by now."""
        self._reward_models = {
            f"ScorerReward.init_args.path of {one.name!r}": ModelSource.of(one.settings.path)
            for one in self.rewards.rewards
            if isinstance(one, ScorerReward)
        }

    @property
    def skipped_steps(self) -> SkippedSteps:
        """Count of optimizer steps whose gradient was not finite."""
        return self.policy_updater.skipped_steps

    @property
    def _own_functions(self) -> dict[str, Callable[..., Any]]:
        return self.objective.own_functions | self.advantage.own_functions

    def record_user_code(self) -> None:
        """Record the code of rewards and of the user's functions; warn if a resume changes it."""
        of_rewards = {one.name: describe_reward_code(one) for one in self.rewards.rewards}
        of_objective = {
            f"model.{key}": describe_function_code(one) for key, one in self._own_functions.items()
        }
        has_begun = self.rollout_step > 0
        self._run_settings.add_reward_code(of_rewards, has_scored=has_begun)
        self._run_settings.add_objective_code(of_objective, has_trained=has_begun)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["rollout_step"] = self.rollout_step
        checkpoint["rewards"] = self.rewards.state_dict()
        checkpoint["functions"] = function_states(self._own_functions)
        stopped = get_stop_reason(self.trainer)
        # An engine that gave up may have sampled with other weights than it said.
        if stopped is None or stopped.exit_code != ExitCode.ENGINE_FAILED:
            checkpoint["rollouts"] = self.collector.state_dict(self.rollout_step)
        checkpoint["num_skipped"] = self.skipped_steps.in_a_row
        checkpoint["num_empty_steps"] = self.empty_steps.in_a_row
        checkpoint["num_rollbacks"] = self.num_rollbacks
        checkpoint |= self.policy_updater.coefficients.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.rollout_step = checkpoint["rollout_step"]
        self.num_rollbacks = checkpoint.get("num_rollbacks", 0)
        self.rewards.load_state_dict(checkpoint["rewards"])
        load_function_states(self._own_functions, checkpoint.get("functions", {}))
        self.collector.load_state_dict(checkpoint.get("rollouts", []))
        self.skipped_steps.load(checkpoint["num_skipped"])
        self.empty_steps.load(checkpoint.get("num_empty_steps", 0))
        self.policy_updater.coefficients.load_state_dict(checkpoint)

    def _sources(self) -> dict[str, ModelSource]:
        source = self.teacher and self.teacher.loaded_from
        teacher = {"model.teacher.path": source} if source else {}
        return super()._sources() | teacher | dict(self._reward_models)

    def settings(self) -> dict[str, Any]:
        rewards = {
            f"rewards.{one.name}": f"{type(one).__name__} with weight {one.weight:g}"
            for one in self.rewards.rewards
        }
        names = {"rewards": [one.name for one in self.rewards.rewards]}
        return super().settings() | plain_settings(self, SETTINGS) | names | rewards

    def changeable_settings(self) -> dict[str, Any]:
        harmless = {key: getattr(self.update, key.removeprefix("update.")) for key in HARMLESS}
        functions = self._own_functions | {
            f"rewards.{one.name}": function
            for one in self.rewards.rewards
            if (function := function_of(one)) is not None
        }
        carried = {f"{key}{CARRIED}": carried_settings(one) for key, one in functions.items()}
        outage = plain_settings(self, ("outage",))
        return super().changeable_settings() | outage | harmless | carried

    def on_roll_back(self, checkpoint: dict[str, Any]) -> None:
        """Take from a checkpoint what belongs to the policy that it restored."""
        self.num_rollbacks += 1
        self.skipped_steps.forget()
        self.policy_updater.coefficients.load_state_dict(checkpoint)
        self.collector.cancel()  # rollouts ahead were sampled with the discarded weights
