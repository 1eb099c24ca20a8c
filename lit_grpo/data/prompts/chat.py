"""Format a conversation with the tokenizer's chat template, its arguments and its tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from lit_grpo.data.rows.sources import Row
from lit_grpo.types import Prompt, UserError
from lit_grpo.types.json_text import parse_json
from lit_grpo.types.rollouts import Message
from lit_grpo.types.tokenizer import Tokenizer

OWN_ARGUMENTS = ("add_generation_prompt", "messages", "tokenize", "tools")
"""Arguments of the chat template that have settings of their own or are always the same."""


def check_template_kwargs(kwargs: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Check that the chat template uses each of these arguments.

    Raises:
        UserError: it does not, so the argument would have no effect.
    """
    for name in kwargs:
        if name in OWN_ARGUMENTS:
            raise UserError(
                f"chat_template_kwargs must not have {name!r} (it is set for every prompt; tools "
                "come from data.tools_column). Remove it from data.chat_template_kwargs."
            )
        if not _uses(tokenizer, name):
            raise UserError(
                f"chat_template_kwargs must be arguments that the tokenizer's chat template uses, "
                f"got {name!r}, which does not occur in it (it would have no effect). Correct or "
                "remove it in data.chat_template_kwargs."
            )


def read_tools(row: Row, column: str | None) -> list[Any] | None:
    """Return the tools of a row: a list, or the JSON text of one; None if there are none.

    Nulls are left out of a list, since parquet and ``datasets`` fill in every field that another
    row has.

    Raises:
        UserError: the column holds something else.
    """
    value = row.columns.get(column) if column is not None else None
    try:
        tools = parse_json(value) if isinstance(value, str) and value.strip() else value
    except ValueError:
        tools = value
    if tools is None or tools == "" or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(
            f"{row.origin}: the tools in column {column!r} must be a list of JSON schemas or the "
            f"JSON text of one, got {value!r}. Repair the row, or set data.tools_column: null if "
            "the chat template must not get this column."
        )
    return tools if isinstance(value, str) else [_without_nulls(tool) for tool in tools]


def describe_answered(prompts: Sequence[Prompt]) -> str:
    """Return a sentence if conversations end with an answer, which the policy would see."""
    answered = sum(
        prompt.messages is not None and prompt.messages[-1]["role"] == "assistant"
        for prompt in prompts
    )
    if not answered:
        return ""
    return (
        f"{answered:,} of {len(prompts):,} prompts end with a turn of the assistant, which the "
        "policy sees before it begins a turn of its own. Where that is the gold answer, move it "
        "to a column answer."
    )


def render_chat(
    messages: Sequence[Message],
    row: Row,
    tokenizer: Tokenizer,
    *,
    tools: list[Any] | None,
    template_kwargs: Mapping[str, Any],
) -> str:
    """Return the prompt of a conversation, up to where the assistant's turn begins.

    Raises:
        UserError: there is no chat template, or it refuses the conversation or ignores its tools.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            f"{row.origin} is a conversation, but the tokenizer has no chat template to format it "
            "with. Set data.chat: false and a data.template, for example "
            "\"{{ prompt[-1]['content'] }}\", or use the tokenizer of an instruction-tuned model."
        )
    if tools is not None and not _uses(tokenizer, "tools"):
        raise UserError(
            f"{row.origin} has tools, but the tokenizer's chat template does not describe them to "
            "the model (they would be lost). Use a model whose template does, or set "
            "data.tools_column: null."
        )
    if any(message.get("tool_calls") for message in messages) and not _uses(
        tokenizer, "tool_calls"
    ):
        raise UserError(
            f"{row.origin} has a message with tool_calls, but the tokenizer's chat template does "
            "not write them (they would be lost). Use a model whose template does, or put the "
            "calls into the content of the message."
        )
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=True,
            tokenize=False,
            **template_kwargs,
        )
    except jinja2.TemplateError as error:
        raise UserError(
            f"{row.origin}: the tokenizer's chat template refuses the roles "
            f"{[message['role'] for message in messages]}: {error}. Unset data.system_prompt or "
            "repair the row."
        ) from error
    return text


def _uses(tokenizer: Tokenizer, name: str) -> bool:
    """Return whether a name occurs in the chat template, which may be one of several by name."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, Mapping) else [template]
    return any(re.search(rf"\b{re.escape(name)}\b", str(text)) for text in texts)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
