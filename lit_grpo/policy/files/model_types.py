"""Explain an architecture that `transformers` does not know; its own error lists hundreds."""

from __future__ import annotations

import re
from contextlib import suppress

from transformers import PreTrainedConfig, __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lit_grpo.types.spelling import did_you_mean

ABOUT_MODEL_TYPE = re.compile(
    r"Unrecognized (configuration class|model identifier)|does not recognize this architecture"
)


def explain_loading(error: Exception, source: str, kind: str) -> str:
    """Return why `transformers` could not load something, in few words and without a full stop.

    Args:
        error: What it raised.
        source: A directory or Hub id.
        kind: What was loaded, such as ``tokenizer``.
    """
    reason = str(error).rstrip(". ")
    if ABOUT_MODEL_TYPE.search(reason):
        with suppress(OSError, ValueError):
            config, _ = PreTrainedConfig.get_config_dict(source)
            return explain_model_type(config.get("model_type"), kind, "its config.json")
    return reason


def explain_model_type(model_type: object, kind: str, place: str) -> str:
    """Return why there is nothing of this kind for a ``model_type``, without a full stop.

    Args:
        model_type: The value; None if it is not set.
        kind: As in `explain_loading`.
        place: What sets it.
    """
    if model_type is None:
        return f"{place} has no model_type"
    if model_type in CONFIG_MAPPING:
        return f"transformers {__version__} has no {kind} for the model_type {model_type!r}"
    hint = did_you_mean(str(model_type), CONFIG_MAPPING)
    return (
        f"transformers {__version__} has no model_type {model_type!r}.{hint} Correct it in "
        f"{place} if it is mistyped; a model that is newer than this transformers needs a newer "
        "one (pip install --upgrade transformers)"
    )
