"""Find and read config files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lit_grpo.cli.commands import BUNDLED, bundled_configs
from lit_grpo.cli.parsing.config_checks import (
    refuse_empty,
    refuse_misplaced,
    refuse_odd_indents,
    refuse_odd_spaces,
    refuse_other_bases,
    refuse_paths_as_sources,
    refuse_repeated_keys,
    refuse_secrets,
)
from lit_grpo.cli.parsing.object_checks import refuse_beside, refuse_other_forms
from lit_grpo.data.rows.files import READERS
from lit_grpo.types import UserError
from lit_grpo.types.paths import at_home, refuse_unreadable
from lit_grpo.types.settings import list_some
from lit_grpo.types.spelling import did_you_mean


def find_config(name: str) -> Path:
    """Return the file with that name, else the bundled config; ``.yaml`` may be left out."""
    name = at_home(name)
    folders = (Path(), BUNDLED)
    candidates = [folder / one for folder in folders for one in (name, f"{name}.yaml")]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None and Path(name).exists() and not Path(name).is_dir():
        raise UserError(
            f"{name}: a config must be a file, got a pipe or a device (it is read more than once, "
            "and by each process of a run). Write it to a file, and give that."
        )
    if path is None and Path(name).is_dir():
        inside = [str(one) for one in sorted(Path(name).glob("*.yaml"))]
        hint = f" In it are {list_some(inside, 5)}." if inside else " There is no .yaml file in it."
        raise UserError(f"{name} is a directory, but a config is a file.{hint}")
    if path is None:
        known = bundled_configs()
        stem = name.removesuffix(".yaml")
        same = [one for one in known if one.rpartition("/")[2] == stem]
        hint = f" Did you mean {same[0]}?" if same else did_you_mean(stem, known)
        beside = [str(one) for one in Path(name).parent.glob("*.y*ml")]
        hint = did_you_mean(name, beside, similarity=0.8) or hint
        if not hint and beside and Path(name).parent != Path():
            hint = f" In {Path(name).parent} are {list_some(sorted(beside), 5)}."
        hint = hint or f" Bundled configs: {', '.join(known)}."
        raise UserError(f"{name}: no such config.{hint}")
    return path


def read_config(path: Path) -> dict[str, Any]:
    """Read one config file.

    Raises:
        UserError: the file is not a YAML mapping, has a key twice or without what belongs under
            it, or interpolates a secret.
    """
    if path.suffix in READERS:
        raise UserError(
            f"{path}: a config must be a YAML file, got a file of data. Set data.train to it."
        )
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        refuse_odd_spaces(root, path)
        refuse_repeated_keys(root, path)
        refuse_other_bases(root, path)
        config = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        refuse_odd_indents(text.splitlines()[:line], path)
        raise UserError(
            f"{path}, line {line}: {error.problem} (not valid YAML).{_yaml_advice(error.problem)}"
        ) from error
    except UserError:
        raise
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8. Save the file as UTF-8.") from error
    except PermissionError:
        refuse_unreadable(path)
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:  # such as of 2024-13-45, no date
        raise UserError(f"{path}: cannot be read as YAML: {error}") from error
    except RecursionError:
        raise UserError(f"{path}: cannot be read as YAML: it is nested too deeply.") from None
    if not isinstance(config, dict):
        got = "an empty file" if config is None else f"the {type(config).__name__} {config!r:.40}"
        raise UserError(f"{path}: a config must be a mapping of keys to values, got {got}.")
    refuse_empty(config, "", path)
    refuse_misplaced(config, path)
    refuse_paths_as_sources(config, path)
    refuse_other_forms(config, str(path))
    refuse_beside(config, "", str(path))
    refuse_secrets(config, str(path))
    return config


def _yaml_advice(problem: str | None) -> str:
    """Return how to repair the commonest mistakes of a YAML file."""
    if "'\\t'" in str(problem):
        return " Indent with spaces: YAML takes no tabs."
    if "expected <block end>" in str(problem) or "mapping values are not allowed" in str(problem):
        return " Keys of one section start in the same column, and those below a key further right."
    return ""
