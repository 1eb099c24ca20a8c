"""Rows become prompts with or without a template or chat template; long ones are dropped."""

import pytest

from lit_grpo.data import PromptFormat, Row
from lit_grpo.data.prompts.prompt_format import build_prompts, in_source
from lit_grpo.data.rows.prepared import text_hash, text_hashes
from lit_grpo.policy.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def row(number: int = 1, **columns) -> Row:
    return Row(source="t.jsonl", number=number, id=f"t:{number}", columns=columns)


def build(*rows: Row, tokenizer=TOKENIZER, **choices):
    return build_prompts(rows, tokenizer, PromptFormat(**choices))


def test_a_plain_prompt_is_tokenized_as_it_is_and_keeps_every_column():
    (prompt,) = build(row(prompt="2+2=", answer="4", level=3, tags=["a"]))
    assert prompt.text == "2+2="
    assert prompt.token_ids == tuple(TOKENIZER("2+2=")["input_ids"])
    assert len(prompt.token_ids) == 4
    assert (prompt.id, prompt.answer, prompt.messages) == ("t:1", "4", None)
    assert prompt.columns == {"prompt": "2+2=", "answer": "4", "level": 3, "tags": ["a"]}


@pytest.mark.parametrize(
    "choices",
    [{}, {"chat": True}, {"template": "<bos>{{ prompt }}"}, {"template": "{{ prompt }}"}],
    ids=str,
)
def test_special_tokens_of_the_tokenizer_are_added_once(choices):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.chat_template = "<bos>{{ messages[0]['content'] }}"
    tokenizer.add_bos_token = True
    tokenizer.update_post_processor()
    (prompt,) = build(row(prompt="2", answer="2"), tokenizer=tokenizer, **choices)
    assert prompt.token_ids == (tokenizer.bos_token_id, *TOKENIZER("2")["input_ids"])


def test_a_template_writes_the_prompt_from_any_column_and_keeps_its_last_newline():
    (prompt,) = build(
        row(left=2, right=3, answer="5"),
        template="Q: {{ left }}+{{ right }}\n{{ note|default }}A:\n",
    )
    assert prompt.text == "Q: 2+3\nA:\n"


@pytest.mark.parametrize("template", ["Q: {prompt}\nA:", "Question:"])
def test_a_template_without_a_column_is_refused(template):
    with pytest.raises(ValueError, match=r"such as \{\{ prompt \}\}, got"):
        build(row(2, prompt="q", answer="a"), template=template)


def test_an_unknown_or_null_column_in_a_template_is_refused_with_the_row():
    with pytest.raises(
        ValueError, match=r"row 2 does not fit the template: 'qestion' is undefined.*"
    ):
        build(row(2, question="q", answer="a"), template="{{ qestion }}")
    with pytest.raises(ValueError, match="row 2 does not fit the template: a value must be text"):
        build(row(2, question=b"\xff", answer="a"), template="{{ question }}")
    with pytest.raises(ValueError, match="row 2 does not fit the template: a value is null"):
        build(row(2, question=None, answer="a"), template="{{ question }}")
    assert build(row(hint=None, answer="a"), template="x{{ hint or '' }}")[0].text == "x"


def test_a_template_that_is_not_jinja_is_refused_at_once():
    with pytest.raises(ValueError, match=r"template must be jinja2, got '\{\{ question \}'"):
        PromptFormat(template="{{ question }")


def test_a_chat_prompt_is_formatted_by_the_chat_template_with_the_system_prompt_first():
    (prompt,) = build(row(question="2+2?", answer="4"), chat=True, system_prompt="Be brief.")
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
    )
    assert prompt.text == "system: Be brief.\nuser: 2+2?\nassistant: "
    assert prompt.token_ids == tuple(TOKENIZER(prompt.text)["input_ids"])


def test_messages_are_always_a_conversation_unless_a_template_makes_them_text():
    messages = [{"role": "user", "content": "2+2?"}]
    data = row(prompt=messages, reward_model={"ground_truth": "4"}, data_source="sums")
    (prompt,) = build(data)
    assert prompt.text == "user: 2+2?\nassistant: "
    assert prompt.messages == tuple(messages)
    assert (prompt.answer, prompt.columns["data_source"]) == ("4", "sums")
    assert build(data, template="{{ prompt[-1].content }} A:")[0].text == "2+2? A:"
    (both,) = build(data, template="{{ prompt[-1].content }} A:", chat=True)
    assert both.text == "user: 2+2? A:\nassistant: "


def test_a_conversation_that_the_chat_template_refuses_is_named_with_its_row():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match=r"row 1: .* refuses the roles \['user'\]: no system role"):
        build(row(prompt="2", answer="2"), tokenizer=tokenizer, chat=True)


def test_a_system_prompt_without_a_conversation_or_beside_another_is_refused():
    with pytest.raises(ValueError, match="but t.jsonl, row 1 is plain text .*data.chat: true"):
        build(row(prompt="2", answer="2"), system_prompt="Be brief.")
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    with pytest.raises(ValueError, match="row 1 already has a system message"):
        build(row(prompt=messages, answer="2"), system_prompt="Be brief.")


def test_a_message_that_only_calls_tools_may_have_no_content():
    calls = [{"function": {"name": "add", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4"},
    ]
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match=r"row 1 has a message with tool_calls.*would be lost"):
        build(row(prompt=messages, answer="4"), tokenizer=tokenizer)
    tokenizer.chat_template = (
        "{% for one in messages %}{{ one.role }}: {{ one.content }}"
        "{{ one.tool_calls[0].function.name if one.tool_calls }}\n{% endfor %}"
    )
    (prompt,) = build(row(prompt=messages, answer="4"), tokenizer=tokenizer)
    assert prompt.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert prompt.text == "user: 2+2?\nassistant: add\ntool: 4\n"


def test_a_prompt_column_whose_lists_are_no_messages_is_named():
    with pytest.raises(ValueError, match="row 4: the prompt column 'prompt' must hold text or a"):
        build(row(4, prompt=["2+2?"], answer="2"))


@pytest.mark.parametrize("turn", [{"role": "user"}, {"role": "user", "content": [1]}])
def test_a_message_without_role_or_text_is_refused(turn):
    with pytest.raises(ValueError, match=r"row 4: a message must have a role and a content"):
        build(row(4, prompt=[turn], answer="2"))


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("choices", [{}, {"template": "user: {{ prompt[0].content }}\n"}], ids=str)
def test_a_content_in_parts_is_their_text_each_on_its_own_line(choices):
    turn = {"role": "user", "content": parts("Solve:", "2+2=")}
    (prompt,) = build(row(prompt=[turn], answer="4"), **choices)
    plain = {"role": "user", "content": "Solve:\n2+2="}
    (expected,) = build(row(prompt=[plain], answer="4"), **choices)
    assert (prompt.text, prompt.messages) == (expected.text, expected.messages)
    assert text_hash([turn]) == text_hash([plain])
    assert [*text_hashes({"prompt": [turn]})] == [*text_hashes({"prompt": [plain]})]


def test_a_content_with_an_image_is_refused():
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    turn = {"role": "user", "content": [*parts("What is this?"), image]}
    said = r"row 4: every part of a message must be text, got image_url \(a policy reads text alone"
    with pytest.raises(ValueError, match=said):
        build(row(4, prompt=[turn], answer="2"))


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="row 1: the prompt '' has no tokens"):
        build(row(note="", answer="2"), template="{{ note }}")


def test_prompts_longer_than_the_limit_are_dropped_in_order():
    rows = [row(n, prompt="x" * n, answer="a") for n in (3, 5, 4, 6)]
    assert [p.id for p in build(*rows, max_prompt_tokens=4)] == ["t:3", "t:4"]
    assert len(build(*rows, max_prompt_tokens=6, too_long="refuse")) == 4


def test_prompts_longer_than_the_limit_are_refused_with_count_and_rows_where_set():
    rows = [row(n, prompt="x" * n, answer="a") for n in (3, 5, 4, 6)]
    with pytest.raises(
        ValueError, match="2 of 4 prompts are longer than .*=4; the longest has 6"
    ) as e:
        build(*rows, max_prompt_tokens=4, too_long="refuse")
    assert "t.jsonl, row 5; t.jsonl, row 6. Raise" in str(e.value)


def test_a_limit_that_leaves_no_prompt_is_an_error_even_when_dropping():
    with pytest.raises(ValueError, match=r"1 of 1 prompts .*\(no prompt would be left\)"):
        build(row(prompt="xxx", answer="a"), max_prompt_tokens=2)


def test_an_unknown_role_and_a_limit_of_zero_are_refused_at_once():
    with pytest.raises(ValueError, match="data.columns must map prompt, answer, id .* role 'gold'"):
        PromptFormat(columns={"gold": "answer"})
    with pytest.raises(ValueError, match="max_prompt_tokens must be >= 1, got 0"):
        PromptFormat(max_prompt_tokens=0)


def test_the_settings_of_a_source_are_named_below_it():
    said = "Set data.columns: {answer: NAME}, or data.require_answer: false of mydata.jsonl."
    assert in_source(said, "sums") == (
        "Set data.sources.sums.data.columns: {answer: NAME}, or "
        "data.sources.sums.data.require_answer: false of mydata.jsonl."
    )
    assert in_source("Set data.sources.a.weight.", "sums") == "Set data.sources.a.weight."
