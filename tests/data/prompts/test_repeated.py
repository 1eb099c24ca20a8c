"""Ids of several prompts and contradicting gold answers are named."""

from tiny import prompt

from lit_grpo.data.prompts.repeated import describe_repeated


def test_prompts_that_differ_need_no_word():
    prompts = [prompt("a", id="1", answer="x"), prompt("b", id="2", answer="y")]
    assert [*describe_repeated(prompts)] == []


def test_copies_with_the_same_or_no_answer_need_no_word():
    prompts = [prompt("a", id=str(number), answer="x") for number in range(3)]
    assert [*describe_repeated([*prompts, prompt("a", id="3", answer=None)])] == []


def test_a_gold_answer_that_is_among_those_of_a_copy_is_no_contradiction():
    prompts = [
        prompt("a", id="1", answer='["7", "7.0"]'),
        prompt("a", id="2", answer="7"),
        prompt("b", id="3", answer='["7", "7.0"]'),
        prompt("b", id="4", answer="8"),
    ]
    (sentence,) = describe_repeated(prompts)
    assert sentence.startswith("1 prompt with more than one gold answer")
    assert "of 3 and '8' of 4" in sentence


def test_ids_of_several_prompts_are_named():
    prompts = [prompt(str(number), id=str(number % 5), answer="x") for number in range(9)]
    (sentence,) = describe_repeated(prompts)
    assert sentence.startswith("4 ids of more than one prompt, such as '0', '1', '2' and 1 more")
    assert "data.columns: {id: NAME}" in sentence


def test_contradicting_gold_answers_are_named_with_their_ids():
    prompts = [
        prompt("a", id="1", answer="x"),
        prompt("b", id="2", answer="x"),
        prompt("a", id="3", answer="x"),
        prompt("a", id="4", answer="y"),
    ]
    (sentence,) = describe_repeated(prompts)
    assert sentence.startswith(
        "1 prompt with more than one gold answer, such as 'x' of 1 and 'y' of 4: they contradict"
    )
