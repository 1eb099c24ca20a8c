"""Prompts from files, datasets and a built-in task, in a deterministic and resumable order."""

from lit_grpo.data.addition import AdditionData
from lit_grpo.data.loading.adaptive import Adaptive
from lit_grpo.data.loading.curriculum import Phase
from lit_grpo.data.loading.loader import TrainingLoader
from lit_grpo.data.mixture import MixtureData, MixtureSource
from lit_grpo.data.module import PromptDataModule
from lit_grpo.data.prompt_data import PromptData
from lit_grpo.data.prompts.prompt_format import PromptFormat
from lit_grpo.data.rows.sources import Row
from lit_grpo.data.rubric import RubricData
from lit_grpo.data.stream_data import StreamData

__all__ = [
    "Adaptive",
    "AdditionData",
    "MixtureData",
    "MixtureSource",
    "Phase",
    "PromptData",
    "PromptDataModule",
    "PromptFormat",
    "Row",
    "RubricData",
    "StreamData",
    "TrainingLoader",
]
