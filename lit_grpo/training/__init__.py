"""Training: GRPO, supervised fine-tuning (SFT), evaluation and their settings."""

from lit_grpo.training.batching import UpdateConfig
from lit_grpo.training.collecting.score_gate import OutagePolicy
from lit_grpo.training.evaluation import Evaluation
from lit_grpo.training.grpo import GRPOModule
from lit_grpo.training.optimizer.master_weights import MasterAdamW
from lit_grpo.training.sft import SFTModule

__all__ = ["Evaluation", "GRPOModule", "MasterAdamW", "OutagePolicy", "SFTModule", "UpdateConfig"]
