"""Errors that the command line prints without a traceback of its own."""

from __future__ import annotations


class UserError(ValueError):
    """The config, the data or the environment is wrong, and the message says what to change.

    The command line prints the message as one line and exits with code 2, at startup and during
    training.
    """


class UserCodeFailed(RuntimeError):
    """A function of the user's has failed by a bug; the message has its traceback."""


class Diverged(FloatingPointError):
    """The policy's logits are no longer finite."""


class EngineFailed(RuntimeError):
    """The engine cannot recover, so the run ends with this message."""


class OutOfMemory(RuntimeError):
    """A stage needed more memory than there is; the message says which, and what to change."""
