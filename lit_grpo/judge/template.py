"""The prompt of a judge: a jinja2 file with blocks ``system`` and ``user`` that users replace.

Everything that the policy wrote is put in once and never read as a template. What stands between
the marks of a call cannot close them: they hold a nonce that is drawn for that call.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lit_grpo.types import Message, UserError

SHIPPED = Path(__file__).parent / "templates"
BLOCKS = ("system", "user")
ID_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


class JudgeTemplate:
    """A template that has been checked.

    Args:
        name: Of one that ships, such as ``grade``, or the path of a file.
        variables: What it is given: ``nonce`` and ``reply_form`` come on top, and it must use
            ``nonce`` and those that ``needed`` names.

    Raises:
        ValueError: no such file, a block that is missing, an unknown variable or one not used.
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
        self._check_marks(tree)

    def _check_blocks(self) -> None:
        if missing := [block for block in BLOCKS if block not in self._template.blocks]:
            raise UserError(
                f"{self.path} must have the blocks {' and '.join(BLOCKS)}, {missing[0]} is missing "
                f"(each becomes a message). Write {{% block {missing[0]} %}} … {{% endblock %}}."
            )

    def _check_variables(self, used: set[str], known: set[str], needed: set[str]) -> None:
        if unknown := sorted(used - known):
            raise UserError(
                f"{self.path} uses {unknown[0]!r}, which it is not given. "
                f"It is given {', '.join(sorted(known))}."
            )
        if unused := sorted(needed - used):
            raise UserError(
                f"{self.path} must use {unused[0]!r} (without it the judge would not see what it "
                "judges)."
            )

    def _check_marks(self, tree: nodes.Template) -> None:
        (user,) = (one for one in tree.find_all(nodes.Block) if one.name == "user")
        if not any(name.name == "nonce" for name in user.find_all(nodes.Name)):
            raise UserError(
                f"{self.path} must use 'nonce' in block user (marks with it say what is to be "
                "judged: without them an answer could pass for an instruction)."
            )

    def render(self, values: Mapping[str, Any]) -> list[Message]:
        """The messages of one call.

        Raises:
            ValueError: the template fails on these values.
        """
        context = self._template.new_context(dict(values))
        try:
            parts = ["".join(self._template.blocks[block](context)) for block in BLOCKS]
        except Exception as error:  # whatever the template's expressions raise
            raise UserError(f"{self.path} fails on this row: {error}.") from error
        pairs = zip(BLOCKS, parts, strict=True)
        return [{"role": role, "content": text.strip()} for role, text in pairs if text.strip()]


def _find(name: str) -> Path:
    path = Path(name)
    shipped = SHIPPED / f"{name}.jinja"
    if path.is_file():
        return path
    if shipped.is_file():
        return shipped
    names = ", ".join(sorted(one.stem for one in SHIPPED.glob("*.jinja")))
    raise UserError(
        f"template must be a file or one that ships ({names}), got {name!r} "
        f"(looked in {Path.cwd()}). Set template in the reward's init_args."
    )


def draw_nonce(content: object) -> str:
    """16 hexadecimal digits that do not occur in what is to be judged."""
    text = json.dumps(content, default=str)
    while (nonce := secrets.token_hex(8)) in text:
        pass
    return nonce


def draw_ids(count: int) -> list[str]:
    """Distinct ids that nobody could have foreseen, short enough to be copied without a slip."""
    ids: dict[str, None] = {}
    while len(ids) < count:
        ids["".join(secrets.choice(ID_LETTERS) for _ in range(4))] = None
    return list(ids)
