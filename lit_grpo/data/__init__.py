"""Prompts from files, datasets and a built-in task, in a deterministic and resumable order."""

from lit_grpo.data.adaptive import Adaptive
from lit_grpo.data.addition import AdditionData
from lit_grpo.data.curriculum import Phase
from lit_grpo.data.loader import PromptLoader, TrainingLoader
from lit_grpo.data.mixture import MixtureData, MixtureSource
from lit_grpo.data.module import PromptDataModule
from lit_grpo.data.prompt_data import PromptData
from lit_grpo.data.prompts import PromptFormat, build_prompts
from lit_grpo.data.rubric import RubricData
from lit_grpo.data.sources import Row, read_rows
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
    "PromptLoader",
    "Row",
    "RubricData",
    "StreamData",
    "TrainingLoader",
    "build_prompts",
    "read_rows",
]
