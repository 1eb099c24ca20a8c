"""The argument parser of a command with keys: LightningCLI's, with errors in one line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from jsonargparse import DefaultHelpFormatter, Namespace
from jsonargparse._common import parser_context
from lightning.pytorch.cli import LightningArgumentParser

from lit_grpo.cli.parsing.environment import override
from lit_grpo.cli.parsing.parser_errors import explain, quote
from lit_grpo.cli.parsing.paths import expand_home
from lit_grpo.cli.parsing.strict import StrictParser
from lit_grpo.cli.parsing.untyped import CommandLineText, keep_nulls, keep_texts, takes_any_text
from lit_grpo.cli.parsing.value_errors import is_null_as_text
from lit_grpo.types import UserError

keep_texts()
keep_nulls()


class HelpFormatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the lines of a description."""


class Parser(StrictParser, LightningArgumentParser):
    """Report errors in one line; parsers of nested classes hand theirs to the outer one."""

    unseeded: tuple[str, ...] = ()
    """Sections of which no file or argument sets the seed."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        line = explain(self, message, ex)
        if self.exit_on_error:
            raise UserError(line) from ex
        raise argparse.ArgumentError(None, quote(line)) from ex

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the arguments say, with the home directory in place of ``~``."""
        return self._seeded(expand_home(super().parse_args(*args, **kwargs)))

    def validate(self, namespace: Any, skip_unset: bool = True, **kwargs: Any) -> None:
        """Check every value, also what jsonargparse lets pass: null, and a value for a section.

        Unknown keys come first: one may be a mistyped name of what is then missing.
        """
        with parser_context(lenient_check=True):
            super().validate(namespace, **kwargs)
        for section in self.groups or ():
            if section in namespace and not isinstance(namespace[section], Namespace):
                raise TypeError(f'Parser key "{section}":\nNo section: {namespace[section]}')
        super().validate(namespace, skip_unset=False, **kwargs)

    def _check_value_key(self, action: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep a text of YAML as it is, but read a word of the command line."""
        if is_null_as_text(action.dest, value, getattr(action, "_typehint", None)):
            raise TypeError(f'Parser key "{action.dest}":\nNull as text')
        if type(value) is CommandLineText:
            value = str(value)
        elif isinstance(value, str) and takes_any_text(action):
            return value
        return super()._check_value_key(action, value, *args, **kwargs)

    def dump(self, cfg: Any, **kwargs: Any) -> str:
        """Return the config as it would run, environment variables included.

        --print_config dumps before anything else can apply them.
        """
        cfg = self._seeded(cfg.clone())
        override(cfg)
        return str(super().dump(cfg, **kwargs))

    def _seeded(self, cfg: Any) -> Any:
        """Let ``seed_everything`` be the seed of sections that have none of their own."""
        seed = cfg.get("seed_everything")
        keys = [f"{one}{inner}.seed" for one in self.unseeded for inner in ("", ".init_args")]
        for key in keys if type(seed) is int else ():
            if key in cfg:
                cfg[key] = seed
        return cfg
