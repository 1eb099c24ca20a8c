"""What the tests of commands share: they run in this process, each in a directory of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from parsers import parsers  # noqa: F401
from run_logs import workplace

from lit_grpo.__main__ import main


@pytest.fixture(autouse=True)
def here(tmp_path) -> Iterator[Path]:
    """The working directory."""
    with workplace(tmp_path) as patch:
        patch.setenv("COLUMNS", "120")
        yield tmp_path


@pytest.fixture
def add_module(here, monkeypatch) -> Callable[[str, str], None]:
    """Write a module of the user's, which is not that of another test."""

    def write(name: str, text: str) -> None:
        (here / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(here)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


@pytest.fixture
def printed_config(capsys) -> Callable[..., dict[str, Any]]:
    """The config that ``fit --print_config`` prints."""

    def run(*arguments: str) -> dict[str, Any]:
        with pytest.raises(SystemExit) as leave:
            main(["fit", *arguments, "--print_config"])
        assert leave.value.code == 0
        return yaml.safe_load(capsys.readouterr().out)

    return run
