"""A modular GRPO trainer for language models on Lightning.

The names below load on first use, so that ``import lit_grpo`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_grpo.data import AdditionData, PromptData, RubricData
    from lit_grpo.objective import AdvantageConfig, DistillationTerm, KLTerm, Objective
    from lit_grpo.policy import LocalTeacher, LoRA, Policy
    from lit_grpo.rewards import FunctionReward, MathReward, Reward
    from lit_grpo.rollout import HFEngine, Sampling, VLLMEngine, VLLMServerEngine, VLLMTeacher
    from lit_grpo.runs.export import export_checkpoint
    from lit_grpo.runs.trainer import Trainer
    from lit_grpo.training import Evaluation, GRPOModule, OutagePolicy, SFTModule, UpdateConfig
    from lit_grpo.types import EngineFailed, UserError

try:
    __version__ = version("lit-grpo")
except PackageNotFoundError:  # a checkout that is used without being installed
    __version__ = "unknown"

_HOMES = {
    "lit_grpo.data": ("AdditionData", "PromptData", "RubricData"),
    "lit_grpo.objective": ("AdvantageConfig", "DistillationTerm", "KLTerm", "Objective"),
    "lit_grpo.policy": ("LoRA", "LocalTeacher", "Policy"),
    "lit_grpo.rewards": ("FunctionReward", "MathReward", "Reward"),
    "lit_grpo.rollout": ("HFEngine", "Sampling", "VLLMEngine", "VLLMServerEngine", "VLLMTeacher"),
    "lit_grpo.runs.export": ("export_checkpoint",),
    "lit_grpo.runs.trainer": ("Trainer",),
    "lit_grpo.training": ("Evaluation", "GRPOModule", "OutagePolicy", "SFTModule", "UpdateConfig"),
    "lit_grpo.types": ("EngineFailed", "UserError"),
}
_PACKAGES = (
    *("callbacks", "data", "judge", "objective", "policy", "rewards", "rollout", "stopping"),
    *("training", "types"),
)
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AdditionData",
    "AdvantageConfig",
    "DistillationTerm",
    "EngineFailed",
    "Evaluation",
    "FunctionReward",
    "GRPOModule",
    "HFEngine",
    "KLTerm",
    "LoRA",
    "LocalTeacher",
    "MathReward",
    "Objective",
    "OutagePolicy",
    "Policy",
    "PromptData",
    "Reward",
    "RubricData",
    "SFTModule",
    "Sampling",
    "Trainer",
    "UpdateConfig",
    "UserError",
    "VLLMEngine",
    "VLLMServerEngine",
    "VLLMTeacher",
    "export_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"lit_grpo.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lit_grpo' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *(one for one in globals() if one.startswith("__"))})
