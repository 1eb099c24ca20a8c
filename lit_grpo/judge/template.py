"""The prompt of a judge: a jinja2 file with the blocks ``system`` and ``user``.

The policy's text is inserted once and never interpreted as a template. It cannot close the
delimiters around it, because they contain a nonce that is drawn for each call.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lit_grpo.types import UserError
from lit_grpo.types.rollouts import Message

SHIPPED = Path(__file__).parent / "templates"
BLOCKS = ("system", "user")
ID_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


class JudgeTemplate:
    """A prompt template, checked when it is loaded.

    Args:
        name: Name of a bundled template, such as ``grade``, or the path of a file.
        variables: Names of the variables that ``render`` passes, except ``nonce`` and
            ``reply_form``.
        needed: Variables that the template must use, in addition to ``nonce``.

    Raises:
        UserError: the file or a block is missing, or a variable is unknown or unused.
    """

    def __init__(self, name: str, variables: Sequence[str], needed: Sequence[str]) -> None:
        self.path = _find(name)
        self.text = self.path.read_text(encoding="utf-8")
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        try:
            tree = environment.parse(self.text)
            self._template = environment.from_string(self.text)
        except TemplateError as error:
            raise UserError(f"{self.path} is not a jinja2 template: {error}.") from error
        self._check_blocks()
        used = meta.find_undeclared_variables(tree)
        self._check_variables(used, {*variables, "nonce", "reply_form"}, set(needed))
        self._check_nonce(tree)

    def _check_blocks(self) -> None:
        if missing := [block for block in BLOCKS if block not in self._template.blocks]:
            raise UserError(
                f"{self.path} must have the blocks {' and '.join(BLOCKS)}; {missing[0]} is missing "
                f"(each becomes a message). Add {{% block {missing[0]} %}} … {{% endblock %}}."
            )

    def _check_variables(self, used: set[str], known: set[str], needed: set[str]) -> None:
        if unknown := sorted(used - known):
            raise UserError(
                f"{self.path} must use known variables only, got {unknown[0]!r}. "
                f"Use {', '.join(sorted(known))}."
            )
        if unused := sorted(needed - used):
            raise UserError(
                f"{self.path} must use {unused[0]!r} (otherwise the judge would not see what it "
                "judges)."
            )

    def _check_nonce(self, tree: nodes.Template) -> None:
        (user,) = (one for one in tree.find_all(nodes.Block) if one.name == "user")
        if not any(name.name == "nonce" for name in user.find_all(nodes.Name)):
            raise UserError(
                f"{self.path} must use 'nonce' in block user (it delimits what is judged: without "
                "it the judge could take an answer for an instruction)."
            )

    def render(self, values: Mapping[str, Any]) -> list[Message]:
        """Return the messages of one call, without empty ones.

        Raises:
            ValueError: the template fails on these values.
        """
        context = self._template.new_context(dict(values))
        try:
            parts = ["".join(self._template.blocks[block](context)) for block in BLOCKS]
        except Exception as error:  # a template's expressions may raise anything
            raise ValueError(f"{self.path} fails on this row: {error}.") from error
        pairs = zip(BLOCKS, parts, strict=True)
        return [{"role": role, "content": text.strip()} for role, text in pairs if text.strip()]


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    shipped = SHIPPED / f"{name}.jinja"
    if path.is_file():
        return path
    if shipped.is_file():
        return shipped
    names = ", ".join(sorted(one.stem for one in SHIPPED.glob("*.jinja")))
    raise UserError(
        f"template must be a file or a bundled template ({names}), got {name!r} "
        f"(looked in {Path.cwd()}). Set template in the reward's init_args."
    )


def draw_nonce(content: object) -> str:
    """Draw 16 hexadecimal digits that do not occur in the content."""
    text = json.dumps(content, default=str)
    while (nonce := secrets.token_hex(8)) in text:
        pass
    return nonce


def draw_ids(count: int) -> list[str]:
    """Draw distinct random ids, which a completion cannot guess, short enough to copy reliably."""
    ids: dict[str, None] = {}
    while len(ids) < count:
        ids["".join(secrets.choice(ID_LETTERS) for _ in range(4))] = None
    return list(ids)
