"""A modular GRPO trainer for language models on Lightning."""

from importlib.metadata import version

__version__ = version("lit-grpo")
