"""Prompts from files, datasets and a built-in task, in a deterministic and resumable order."""

from lit_grpo.data.addition import AdditionData
from lit_grpo.data.loading.adaptive import Adaptive
from lit_grpo.data.loading.curriculum import Phase
from lit_grpo.data.loading.loader import PromptLoader, TrainingLoader
from lit_grpo.data.mixture import MixtureData, MixtureSource
from lit_grpo.data.module import PromptDataModule
from lit_grpo.data.prompt_data import PromptData
from lit_grpo.data.prompts.prompt_format import PromptFormat, build_prompts
from lit_grpo.data.rows.sources import Row, read_rows
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
    "PromptLoader",
    "Row",
    "RubricData",
    "StreamData",
    "TrainingLoader",
    "build_prompts",
    "read_rows",
]
