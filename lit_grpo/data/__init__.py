"""Prompts from files, datasets and a built-in task, in a deterministic and resumable order."""

from lit_grpo.data.addition import AdditionData
from lit_grpo.data.loader import PromptLoader, TrainingLoader
from lit_grpo.data.module import PromptData, PromptDataModule
from lit_grpo.data.prompts import PromptFormat, build_prompts
from lit_grpo.data.rubric import RubricData
from lit_grpo.data.sources import Row, read_rows

__all__ = [
    "AdditionData",
    "PromptData",
    "PromptDataModule",
    "PromptFormat",
    "PromptLoader",
    "Row",
    "RubricData",
    "TrainingLoader",
    "build_prompts",
    "read_rows",
]
