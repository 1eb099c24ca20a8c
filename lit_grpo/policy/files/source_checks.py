"""Check where models and tokenizers are loaded from, with errors that name the setting."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.policy.files.model_types import explain_loading
from lit_grpo.types import UserError

log = logging.getLogger(__name__)


def is_hub_id(source: str) -> bool:
    """Return whether a source may be an id on the Hub: no such path, and not only a path."""
    is_path = source.count("/") > 1 or source.startswith((".", "~", "/"))
    return not is_path and not Path(source).exists()


def _check_source(what: str, source: str, patterns: Sequence[str], key: str) -> None:
    """Check that a source which can only be a path is a directory with one of the files.

    Otherwise it would be requested from the Hub, which takes a minute without a network.

    Raises:
        UserError: it does not exist, is a file, or has none of them.
    """
    directory = Path(source)
    if not is_hub_id(source) and not directory.exists():
        raise UserError(
            f"no {what} could be loaded from {source!r}: there is no such directory. "
            f"Set {key} to a directory that save_pretrained wrote (lit-grpo sft and fit write "
            "RUN/final) or to a hub id."
        )
    of_run = _model_of_run(directory, key)
    if directory.is_file():
        fix = of_run or (
            f"Set {key} to the directory of the file, or to a directory that save_pretrained wrote."
        )
        raise UserError(
            f"no {what} could be loaded from {source!r}: it must be a directory or a hub id, got a "
            f"file. {fix}"
        )
    if not directory.is_dir() or any(any(directory.glob(pattern)) for pattern in patterns):
        return
    found = ", ".join(sorted(path.name for path in directory.iterdir())[:10]) or "nothing"
    fix = of_run or f"Set {key} to a directory that save_pretrained wrote or to a hub id."
    if what == "tokenizer" and not of_run and (directory / "config.json").exists():
        fix = (
            "Save that of the model there, too (tokenizer.save_pretrained), or set "
            "model.policy.tokenizer to a directory or hub id that has it."
        )
    raise UserError(
        f"no {what} could be loaded from {source!r}: the directory must have a {what}'s files, "
        f"such as {patterns[0]}, got one with {found}. {fix}"
    )


def _model_of_run(path: Path, key: str) -> str:
    """Return the remedy for a run's directory, or its checkpoints; empty for another path."""
    inner = next((one for one in (path, path.parent) if one.name == "checkpoints"), None)
    run = path if inner is None else inner.parent
    if (run / "final").is_dir():
        return f"Set {key} to {run / 'final'}, the model of that run."
    if (run / "checkpoints").is_dir():
        return (
            f"The run {run} has no final model. Write one from a checkpoint with lit-grpo "
            f"checkpoints {run} --export DIRECTORY, and set {key} to that directory."
        )
    return ""


def _check_short_name(what: str, source: str, key: str) -> None:
    """Check that the Hub answers for a name such as ``gpt2``, which may be a mistyped directory.

    `transformers` would ask again and again, for a minute.

    Raises:
        UserError: the Hub does not answer, and its cache does not have the name.
    """
    if constants.HF_HUB_OFFLINE or try_to_load_from_cache(source, "config.json"):
        return
    url = hf_hub_url(source, "config.json", endpoint=constants.ENDPOINT)
    try:
        get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HfHubHTTPError:
        return  # it has answered: `transformers` says what
    except Exception as error:  # httpx's errors, or those of its successor
        raise UserError(
            f"no {what} could be loaded from {source!r}: there is no such directory, and "
            f"{constants.ENDPOINT} does not answer ({error}). Set {key} to a directory that "
            "save_pretrained wrote or to a hub id, such as Qwen/Qwen2.5-0.5B."
        ) from error


@contextmanager
def explained_errors(what: str, source: str, patterns: Sequence[str], key: str) -> Iterator[None]:
    """Replace the errors of `transformers` with one that names the source and the setting.

    Args:
        patterns: Files of which a local source has at least one.
    """
    _check_source(what, source, patterns, key)
    exists = Path(source).exists()
    if not exists:
        rank_zero_only(log.info)("%s is not a directory: asking the Hub for the %s", source, what)
    try:
        if not exists and "/" not in source:
            _check_short_name(what, source, key)
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        tried = "" if exists else " (not a local directory, so tried on the Hub)"
        kind = "causal language model" if what == "model" else what
        raise UserError(
            f"no {what} could be loaded from {source!r}{tried}: "
            f"{explain_loading(error, source, kind)}. Set {key} to a directory that "
            "save_pretrained wrote or to a hub id."
        ) from error
