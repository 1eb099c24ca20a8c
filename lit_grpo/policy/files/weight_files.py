"""Check the files of a model's weights by their headers, which say how long they must be."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.peft_utils import ADAPTER_SAFE_WEIGHTS_NAME

from lit_grpo.types import UserError
from lit_grpo.types.paths import refuse_unreadable
from lit_grpo.types.settings import list_some


def check_weight_files(path: str, key: str) -> None:
    """Check that the safetensors files of a local model are whole; no weights are read.

    Only the files that `transformers` and `peft` load are checked; others are ignored.

    Args:
        path: A directory; what is on the Hub is not checked.
        key: The setting that names the path, for errors.

    Raises:
        UserError: a file or the index is cut off or damaged, or the index names one that is not
            there.
    """
    directory = Path(path)
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    try:
        files = safetensors_files(directory)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(index, error, key) from error
    if lacking := [file.name for file in files if not file.exists()]:
        raise UserError(
            f"{directory} lacks {list_some(lacking, 3)}, which its {index.name} names. Copy the "
            f"model again. Set {key} to a whole one."
        )
    for file in files:
        refuse_unreadable(file)
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error, key) from error


def safetensors_files(directory: Path) -> list[Path]:
    """Return the files that `transformers` or `peft` load from a directory; they may be missing.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: the index is damaged.
    """
    single = [directory / name for name in (SAFE_WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME)]
    found = [file for file in single if file.is_file()]
    return found or _indexed(directory / SAFE_WEIGHTS_INDEX_NAME)


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index names; none without one."""
    if not index.is_file():
        return []
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [index.parent / name for name in sorted(set(names))]


def _damaged(file: Path, error: Exception, key: str) -> UserError:
    return UserError(
        f"{file} is damaged or was not copied whole ({error}). Copy or save the model again. Set "
        f"{key} to a whole one."
    )
