"""Check the files of a model's weights by their headers, which say how long they must be."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lit_grpo.types import UserError, list_some

INDEX = "model.safetensors.index.json"


def check_weight_files(path: str, key: str) -> None:
    """Check that the safetensors files of a local model are whole; no weights are read.

    Args:
        path: A directory; what is on the Hub is not checked.
        key: The setting that names the path, for errors.

    Raises:
        UserError: one is cut off, damaged, or named by the index and not there.
    """
    directory = Path(path)
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is damaged or was not copied whole ({error}). Copy or save the model "
                f"again. Set {key} to a whole one."
            ) from error
    index = directory / INDEX
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        if lacking := sorted(one for one in named if not (directory / one).exists()):
            raise UserError(
                f"{directory} lacks {list_some(lacking, 3)}, which its {INDEX} names. Copy the "
                f"model again. Set {key} to a whole one."
            )
