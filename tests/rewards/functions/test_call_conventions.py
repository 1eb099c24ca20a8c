import re
from dataclasses import replace

import pytest
from reward_functions import CHAT, accuracy, compute_score, run, verl_row
from tiny import prompt

from lit_grpo.rewards import FunctionReward
from lit_grpo.types import Prompt


def test_conversational_prompt_gives_lists_of_messages():
    def look(prompts, completions, level, **kwargs):
        assert prompts == [[{"role": "user", "content": "1+1="}]] * 2
        assert completions[1] == [{"role": "assistant", "content": "3"}]
        return level

    assert run(FunctionReward(look), CHAT, "2", "3").rewards.tolist() == [[3.0, 3.0]]


def reads_a_conversation(completions, **columns):
    return [float(one[0]["content"] == "2") for one in completions]


def reads_a_text(completions, **columns):
    return [float(one.strip() == "2") for one in completions]


def searches_a_text(completions, **columns):
    return [float(bool(re.search("2", one))) for one in completions]


def counts_texts(completions, **columns):
    return [1 / len({*completions})] * len(completions)


def counts_messages(completions, **columns):
    return [1 / len({one[0] for one in completions})] * len(completions)


def has_another_bug(completions, **columns):
    return [len(columns) + "2" for _ in completions]


@pytest.mark.parametrize(
    ("function", "row", "said"),
    [
        (reads_a_conversation, prompt("1"), "a text here, as the prompt is. With data.chat: true"),
        (reads_a_text, CHAT, 'a conversation here, as the prompt is: its text is completion[0]["c'),
        (searches_a_text, CHAT, "a conversation here, as the prompt is: its text is completion"),
        (counts_texts, CHAT, "a conversation here, as the prompt is: its text"),
        (counts_messages, CHAT, "a conversation here, as the prompt is: its text"),
        (has_another_bug, CHAT, ""),
        (has_another_bug, prompt("1"), ""),
    ],
)
def test_a_function_that_takes_texts_for_conversations_is_told_what_they_are(function, row, said):
    (score,) = run(FunctionReward(function), row, "2").groups[0].scores[function.__name__]
    assert "Each completion is" in score.bug if said else "Each completion is" not in score.bug
    assert said in score.bug


@pytest.mark.parametrize(("answer", "value"), [('["8", "8.0"]', ["8", "8.0"]), ("8", 8)])
def test_a_gold_answer_that_is_no_text_stays_what_it_is(answer, value):
    given = []

    def keeps(completions, answer):
        given.extend(answer)
        return [1.0 for _ in completions]

    def keeps_truth(solution_str, ground_truth):
        given.append(ground_truth)
        return 1.0

    one = replace(prompt("1", answer=answer), given_answer=value)
    for function in (keeps, keeps_truth):
        run(FunctionReward(function), one, "8")
    run(FunctionReward(keeps), prompt("1", answer=answer), "8")
    assert given == [value, value, answer]


def test_column_called_answer_takes_precedence_over_the_gold_answer():
    row = Prompt(
        id="p", text="q", token_ids=(1,), answer="72", columns={"answer": "48 + 24 = 72 #### 72"}
    )
    assert run(FunctionReward(accuracy), row, "48 + 24 = 72 #### 72").rewards.tolist() == [[1.0]]


def test_function_in_verls_form_gets_verls_four_arguments_and_no_column():
    seen = []

    def look(solution_str, **given):
        seen.append(given | {"solution_str": solution_str})
        return len(seen)

    row = verl_row(ability="math")
    assert run(FunctionReward(look), row, "a", "b").rewards.tolist() == [[1.0, 2.0]]
    assert seen[1] == {
        "data_source": "openai/gsm8k",
        "solution_str": "b",
        "ground_truth": "72",
        "extra_info": {"split": "train", "index": 0},
    }


def test_ground_truth_is_the_gold_answer_without_a_reward_model_column():
    row = prompt(answer="72", data_source="openai/gsm8k")
    assert run(FunctionReward(compute_score), row, "72", "7").rewards.tolist() == [[1.0, 0.0]]


def test_ground_truth_may_be_other_than_text():
    def within(solution_str, ground_truth):
        return float(ground_truth["low"] <= float(solution_str) <= ground_truth["high"])

    row = verl_row(reward_model={"ground_truth": {"low": 1, "high": 2}})
    assert run(FunctionReward(within), row, "1.5", "3").rewards.tolist() == [[1.0, 0.0]]
