"""Turn rows into prompts: apply the template or chat template, tokenize, check the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import jinja2

from lit_grpo.data.columns import Role, gold_answers, list_rows, prompt_id, prompt_value
from lit_grpo.data.sources import Row
from lit_grpo.types import Message, Prompt, Tokenizer, UserError, check_range


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How rows become prompts; `PromptData` explains each setting.

    Raises:
        UserError: an unknown role, a template with a syntax error, or a limit below 1.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    system_prompt: str | None = None
    chat: bool = False
    max_prompt_tokens: int | None = None
    too_long: Literal["drop", "refuse"] = "drop"
    require_answer: bool = True

    def __post_init__(self) -> None:
        for role in self.columns:
            if role not in get_args(Role):
                raise UserError(
                    f"columns must map {', '.join(get_args(Role))} to names of columns, got the "
                    f"role {role!r} (all other columns reach the rewards as they are). "
                    "Set data.columns."
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
        environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined, finalize=_refuse_null, keep_trailing_newline=True
        )
        try:
            return environment.from_string(self.template)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"template must be jinja2, got {self.template!r} ({error.message}). "
                "Set data.template."
            ) from error


def build_prompts(
    rows: Sequence[Row], tokenizer: Tokenizer, prompt_format: PromptFormat
) -> list[Prompt]:
    """Return the prompts of these rows in order, without those that are too long.

    Raises:
        UserError: a column or a gold answer is missing, a prompt cannot be built, or no prompt is
            left.
    """
    answers = gold_answers(rows, prompt_format.columns, required=prompt_format.require_answer)
    prompts = [
        _build_prompt(row, answer, tokenizer, prompt_format)
        for row, answer in zip(rows, answers, strict=True)
    ]
    return _within_limit(rows, prompts, prompt_format)


def _build_prompt(
    row: Row, answer: str | None, tokenizer: Tokenizer, prompt_format: PromptFormat
) -> Prompt:
    template = prompt_format.compiled_template
    value = prompt_value(row, prompt_format.columns) if template is None else _render(row, template)
    messages = _to_messages(value, row, prompt_format)
    text = str(value) if messages is None else _render_chat(messages, row, tokenizer)
    # A chat template writes its own special tokens.
    special_tokens = {} if messages is None else {"add_special_tokens": False}
    token_ids = tuple(tokenizer(text, **special_tokens)["input_ids"])
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
        columns=row.columns,
    )


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise jinja2.UndefinedError("a value is null; write {{ NAME or '' }} where that is fine")
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
        if prompt_format.system_prompt is not None:
            raise UserError(
                f"system_prompt needs a conversation, but {row.origin} is plain text (it would be "
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
    is_message = isinstance(turn, Mapping) and all(
        isinstance(turn.get(key), str) for key in ("role", "content")
    )
    if not is_message:
        raise UserError(
            f"{row.origin}: a message must have a role and a content that are text, got {turn!r}. "
            "Repair or remove the row."
        )
    message: Message = turn
    return message


def _render_chat(messages: tuple[Message, ...], row: Row, tokenizer: Tokenizer) -> str:
    if tokenizer.chat_template is None:
        raise UserError(
            f"{row.origin} is a conversation, but the tokenizer has no chat template to format it "
            "with. Set data.chat: false and a data.template, for example "
            "\"{{ prompt[-1]['content'] }}\", or use the tokenizer of an instruction-tuned model."
        )
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
    except jinja2.TemplateError as error:
        raise UserError(
            f"{row.origin}: the tokenizer's chat template refuses the roles "
            f"{[message['role'] for message in messages]}: {error}. Unset data.system_prompt or "
            "repair the row."
        ) from error
    return text


def _within_limit(
    rows: Sequence[Row], prompts: list[Prompt], prompt_format: PromptFormat
) -> list[Prompt]:
    limit = prompt_format.max_prompt_tokens
    if limit is None:
        return prompts
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    if len(kept) == len(prompts) or (prompt_format.too_long == "drop" and kept):
        return kept
    long = [row for row, p in zip(rows, prompts, strict=True) if len(p.token_ids) > limit]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    raise UserError(
        f"{len(long)} of {len(prompts)} prompts are longer than max_prompt_tokens={limit}; the "
        f"longest has {longest} tokens: {list_rows(long)}. Raise data.max_prompt_tokens"
        + (", or set data.too_long: drop." if kept else " (no prompt would be left).")
    )
