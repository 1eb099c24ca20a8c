"""Parsers of commands, built once in a process: to build one is half of reading a config."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest
from lightning.pytorch.cli import LightningArgumentParser

from lit_grpo.cli.command_line import CommandLine


@pytest.fixture(autouse=True, scope="session")
def parsers() -> Iterator[None]:
    """Let the tests of a folder, whose ``conftest.py`` imports this, share their parsers."""
    with pytest.MonkeyPatch.context() as patch:
        reuse_parsers(patch)
        yield


def reuse_parsers(patch: pytest.MonkeyPatch) -> None:
    """Let commands of the same name, for the same kind of training, share their parser."""
    built: dict[Hashable, LightningArgumentParser] = {}
    build = CommandLine.setup_parser

    def setup_parser(self: CommandLine, *args: Any, **kwargs: Any) -> None:
        kind = self.command, self._model_class, self.subclass_mode_model
        if kind not in built:
            build(self, *args, **kwargs)
            built[kind] = self.parser
        self.parser = built[kind]
        self.parser.set_defaults({"run_dir": self.default_run_dir})

    patch.setattr(CommandLine, "setup_parser", setup_parser)
