"""Turn rows into prompts: apply the template or chat template, tokenize, check the length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import jinja2
import yaml

from lit_grpo.data.prompts.chat import check_template_kwargs, read_tools, render_chat
from lit_grpo.data.rows.columns import (
    Role,
    joined_parts,
    list_rows,
    other_parts,
    prompt_id,
    prompt_value,
)
from lit_grpo.data.rows.gold import given_answer, gold_answers
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import Prompt, UserError, check_range
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.rollouts import Message
from lit_grpo.types.spelling import did_you_mean
from lit_grpo.types.tokenizer import Tokenizer, starts_with_bos


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How rows become prompts; `PromptData` explains each setting.

    Raises:
        UserError: an unknown role, a template with a syntax error or without a column, or a limit
            below 1.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    system_prompt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools_column: str | None = "tools"
    chat: bool = False
    max_prompt_tokens: int | None = None
    too_long: Literal["drop", "refuse"] = "drop"
    require_answer: bool = True

    def __post_init__(self) -> None:
        check_fields("data", self)
        for role in self.columns:
            if role not in get_args(Role):
                raise UserError(
                    f"data.columns must map {', '.join(get_args(Role))} to names of columns, got "
                    f"the role {role!r} (all other columns reach the rewards as they are)."
                    f"{did_you_mean(role, get_args(Role))}"
                )
        check_range(
            "data.max_prompt_tokens",
            self.max_prompt_tokens,
            at_least=1,
            why="no prompt would be left; null means no limit",
        )
        _ = self.compiled_template  # refuses a syntax error before any data is read

    @cached_property
    def compiled_template(self) -> jinja2.Template | None:
        """The template, or None without one."""
        if self.template is None:
            return None
        if "{{" not in self.template and "{%" not in self.template:
            raise UserError(
                f"template must have a column between two braces, such as {{{{ prompt }}}}, got "
                f"{self.template!r} (every row would get this same prompt). Set data.template."
            )
        environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined, finalize=_checked_value, keep_trailing_newline=True
        )
        try:
            return environment.from_string(self.template)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"template must be jinja2, got {self.template!r} ({error.message}). "
                "Set data.template."
            ) from error


def build_prompts(
    rows: Sequence[Row], tokenizer: Tokenizer, prompt_format: PromptFormat, what: str = ""
) -> list[Prompt]:
    """Return the prompts of these rows in order, without those that are too long.

    Args:
        what: What these rows are, for an error about all of them.

    Raises:
        UserError: a column or a gold answer is missing, a prompt cannot be built, or no prompt is
            left.
    """
    if tokenizer.chat_template is not None:
        check_template_kwargs(prompt_format.chat_template_kwargs, tokenizer)
    check_tools_column(rows, prompt_format.tools_column)
    answers = gold_answers(rows, prompt_format.columns, required=prompt_format.require_answer)
    prompts = [
        build_prompt(row, answer, tokenizer, prompt_format)
        for row, answer in zip(rows, answers, strict=True)
    ]
    return _within_limit(rows, prompts, prompt_format, what)


def in_prompt_format(message: str, owner: str) -> str:
    """Reword settings of a config as arguments of the `PromptFormat` that a data module has.

    Args:
        owner: Name of the class of the data module.
    """
    columns = re.compile(r"data\.columns: (\{[^}]*\})")
    reworded = columns.sub(lambda found: f"columns={yaml.safe_load(found[1])}", message)
    reworded = reworded.replace("data.require_answer: false", "require_answer=False")
    if reworded == message:
        return message
    return f"{reworded} These are arguments of PromptFormat: set prompt_format of {owner}."


def in_source(message: str, source: str) -> str:
    """Reword settings of ``data`` as those of a source of a mixture."""
    return re.sub(r"(?<![\w.])data\.(?!sources\b)(?=\w)", f"data.sources.{source}.data.", message)


def check_tools_column(rows: Sequence[Row], column: str | None) -> None:
    """Check that some row has the column, unless it is the default, which need not exist."""
    is_chosen = column not in (None, PromptFormat.tools_column)
    if rows and is_chosen and all(column not in row.columns for row in rows):
        raise UserError(
            f"tools_column must be a column of the data, got {column!r}; {rows[0].origin} has "
            f"{', '.join(rows[0].columns)}. Set data.tools_column."
        )


def build_prompt(
    row: Row, answer: str | None, tokenizer: Tokenizer, prompt_format: PromptFormat
) -> Prompt:
    """Return the prompt of a row, however long it is.

    Raises:
        UserError: a column is missing, or the prompt cannot be built.
    """
    template = prompt_format.compiled_template
    value = prompt_value(row, prompt_format.columns) if template is None else _render(row, template)
    messages = _to_messages(value, row, prompt_format)
    if messages is None:
        text = str(value)
    else:
        text = render_chat(
            *(messages, row, tokenizer),
            tools=read_tools(row, prompt_format.tools_column),
            template_kwargs=prompt_format.chat_template_kwargs,
        )
    # A chat template writes its own special tokens, and any other template may.
    is_complete = messages is not None or starts_with_bos(text, tokenizer)
    token_ids = tuple(tokenizer(text, add_special_tokens=not is_complete)["input_ids"])
    if not token_ids:
        raise UserError(
            f"{row.origin}: the prompt {text!r} has no tokens (a policy needs at least one). "
            "Fill or remove the row."
        )
    return Prompt(
        id=prompt_id(row, prompt_format.columns),
        text=text,
        token_ids=token_ids,
        messages=messages,
        answer=answer,
        given_answer=None if answer is None else given_answer(row, prompt_format.columns),
        columns=row.columns,
    )


def _checked_value(value: Any) -> Any:
    value = joined_parts(value)
    if value is None:
        raise jinja2.UndefinedError("a value is null; write {{ NAME or '' }} where that is fine")
    if isinstance(value, bytes):
        raise jinja2.UndefinedError(f"a value must be text, got the bytes {value[:20]!r}")
    return value


def _render(row: Row, template: jinja2.Template) -> str:
    try:
        return template.render(row.columns)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise UserError(
            f"{row.origin} does not fit the template: {error}; the row has "
            f"{', '.join(row.columns)}. Set data.template."
        ) from error


def _to_messages(
    value: str | list[Any], row: Row, prompt_format: PromptFormat
) -> tuple[Message, ...] | None:
    """Return the conversation, or None for a prompt that is plain text."""
    if isinstance(value, str) and not prompt_format.chat:
        for name in ("system_prompt", "chat_template_kwargs"):
            if getattr(prompt_format, name):
                raise UserError(
                    f"{name} needs a conversation, but {row.origin} is plain text (it would be "
                    "lost). Set data.chat: true, or write it into data.template."
                )
        return None
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
    messages = tuple(_check_message(turn, row) for turn in turns)
    if prompt_format.system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise UserError(
            f"{row.origin} already has a system message, and data.system_prompt is set too (a "
            "conversation takes one). Remove one of them."
        )
    return ({"role": "system", "content": prompt_format.system_prompt}, *messages)


def _check_message(turn: Any, row: Row) -> Message:
    """Return a message with a content that is text.

    That of one that only calls tools may be null, and becomes empty.
    """
    if isinstance(turn, Mapping):
        content = turn.get("content")
        if others := other_parts(content):
            raise UserError(
                f"{row.origin}: every part of a message must be text, got {' and '.join(others)} "
                "(a policy reads text alone). Remove the row, or put what it needs into words."
            )
        is_call = content is None and turn.get("tool_calls")
        turn = {**turn, "content": "" if is_call else joined_parts(content)}
    is_message = isinstance(turn, Mapping) and all(
        isinstance(turn.get(key), str) for key in ("role", "content")
    )
    if not is_message:
        raise UserError(
            f"{row.origin}: a message must have a role and a content that are text, got {turn!r} "
            "(the content may be a list of parts of type text, or null beside tool_calls). Repair "
            "or remove the row."
        )
    message: Message = turn
    return message


def _within_limit(
    rows: Sequence[Row], prompts: list[Prompt], prompt_format: PromptFormat, what: str
) -> list[Prompt]:
    limit = prompt_format.max_prompt_tokens
    if limit is None:
        return prompts
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    if len(kept) == len(prompts) or (prompt_format.too_long == "drop" and kept):
        return kept
    long = [row for row, p in zip(rows, prompts, strict=True) if len(p.token_ids) > limit]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    of_what = f" of the {what}" if what else ""
    fix = ", or set data.too_long: drop." if kept else f" (no prompt{of_what} would be left)."
    raise UserError(
        f"{len(long)} of {len(prompts)} prompts{of_what} are longer than "
        f"max_prompt_tokens={limit}; the longest has {longest} tokens: {list_rows(long)}. Raise "
        f"data.max_prompt_tokens{fix}"
    )
