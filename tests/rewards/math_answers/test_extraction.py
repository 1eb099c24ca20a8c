import pytest

from lit_grpo.rewards.math_answers.extraction import STOP_MARKERS, find_answer, read_gold


def found(text, stop_markers=STOP_MARKERS, tail_characters=1000):
    answer = find_answer(text, stop_markers, tail_characters)
    return None if answer is None else answer.text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5} and \boxed{7}", "5, 7"),
        (r"\boxed{5}, no, \boxed{7}", "7"),
        (r"$x=\boxed{5}$, $y=\boxed{7}$", "x=5, y=7"),
        (r"\boxed{5}. We check: \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1,2\right\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{5} or so \boxed{3", "5"),
        (r"\boxed{} hmm \boxed{5} and \boxed{ }", "5"),
        (r"\fbox{5} 6", "5"),
        (r"The answer is 6. \boxed{5} 7", "5"),
        ("work 3\n#### 1,234", "1,234"),
        ("#### 5 #### 6", "6"),
        ("#### 72 clips", "72 clips"),
        ("The answer is 18.", "18"),
        ("The answer is $18.", "$18"),
        ("The final answer is **18 dollars**. Yes 3", "18 dollars"),
        ("The answer is $18 and she has $20 left", "$18"),
        ("The answer is 5 because 3 + 2 = 5 and 7", "5"),
        ("The answer is 5. The answer is 6.", "6"),
        ("The answer is that all of them have 5 apples", "5"),
        (r"The answer is $\frac{1}{2}$ of the 3", r"\frac{1}{2}"),
        ("**Answer:** 18", "18"),
        ("**Answer**: 18", "18"),
        ("Answer:\n\n18\nBye 3", "18"),
        ("A: 72\nDone 5", "72"),
        ("The answer is (C).", "C"),
        ("Answer: x = 5, y = 6", "x = 5, y = 6"),
        ("5 + 3 = 8 apples", "8"),
        ("below zero: -5", "-5"),
        ("She needs 1 3/4 cups.", "1 3/4"),
        ("We meet at 12:30", "12:30"),
        ("It costs $1,000,000.", "$1,000,000"),
        ("It is 1.5e3.", "1.5e3"),
        (r"So it is \dfrac{9}{7}", "9/7"),
        (r"so it is $\sqrt{3}$.", r"\sqrt{3}"),
        (r"Thus \[ x = \sqrt{3} \]", r"x = \sqrt{3}"),
        ("first\n\\sqrt{3}", r"\sqrt{3}"),
        ("$18 + $20 = $38", "$38"),
        ("x = 7", "7"),
        ("5! it is, so the answer is 5!", "5"),
        (r"\boxed{5!}", "5!"),
    ],
)
def test_final_answer_is_found(text, answer):
    assert found(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        *("", "nobody has any idea", "####", "Question: how many are there?", r"\boxed{"),
        "so it will be 10-5",  # a calculation, not its result
    ],
)
def test_completion_without_an_answer_has_none(text):
    assert found(text) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *(("fbab", "fbab"), (" Paris\n", "paris"), ("Yes.", "yes"), ("B", "B"), ("(B)", "B")),
        *(("**B**", "B"), ("New York City.", "new york city"), ("no idea", "no idea")),
        *(("I think it is Paris", None), ("Paris\n\nor London then", None)),
    ],
)
def test_a_completion_of_a_few_words_or_a_letter_is_an_answer_as_a_whole(text, answer):
    assert found(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 5.\n\nHuman: and 2 + 2?\nAssistant: The answer is 4", "5"),
        ("She has 5.\nQuestion: how many? 4", "4"),
        ("3 share 24.\n\nQuestion: how many each?\n\\boxed{8}", "8"),
        ("#### 72 Question: next\n#### 4", "72"),
        ("A: 72\n\nQ: 2 + 2?\nA: 4", "72"),
        ("Question: what is 2 + 3?\nAnswer: 5", "5"),
        ("**Problem:** what?\nAnswer: 5", "5"),
        ("Let me see the FAQ: 5", "5"),
    ],
)
def test_text_after_a_stop_marker_is_ignored_once_there_is_an_answer(text, answer):
    assert found(text) == answer


def test_stop_markers_can_be_set():
    text = "The answer is 5.\nNext exercise: the answer is 6"
    assert found(text, stop_markers=()) == "6"
    assert found(text, stop_markers=("Next exercise:",)) == "5"


def test_a_number_without_a_mark_is_read_in_the_tail_only():
    assert found("It is 5" + " and so on" * 200) is None
    assert found("The answer is 5." + " and so on" * 200) == "5"
    assert found(r"\boxed{5}" + " and so on" * 200) == "5"
    assert found("7 " * 20_000 + "#### 5") == "5"


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("part", "answer"),
    [
        *(("Question: ", None), (r"\boxed{", None), ("the answer is ", None), ("answer ", None)),
        *(("{", None), ("(", None), ("1,", "1"), ("1 ", "1"), ("\n", None), ("9", "9" * 1000)),
        *((r"\boxed{1}", "1"), ("#### ", None), ("is the answer ", None)),
    ],
)
def test_degenerate_completion_is_read_quickly(part, answer):
    assert found(part * (100_000 // len(part))) == answer


@pytest.mark.timeout(20)
@pytest.mark.parametrize("part", ["_", '"', "= ", "{", r"\boxed{", "ab ", "$", "1,", r"\frac"])
def test_box_full_of_one_text_is_read_quickly(part):
    found(r"\boxed{" + part * (100_000 // len(part)) + "}")


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("48/2 = <<48/2=24>>24 clips.\n#### 72", "72"),
        ("A: 72", "72"),
        ("The answer is 72.", "72"),
        (r"We get \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (" 72 ", "72"),
        (r"[0,1)", "[0,1)"),
        ("Tuesday", "tuesday"),
        ("18 dollars for each of the days", "18 dollars for each of the days"),
    ],
)
def test_gold_may_be_bare_or_marked(text, gold):
    assert read_gold(text).text == gold


@pytest.mark.parametrize(
    "text",
    ["", " ", "nan", "None", "null", "N/A", "<NA>", "She sold 72 clips in May altogether"],
)
def test_missing_value_or_sentence_is_not_a_gold_answer(text):
    assert read_gold(text) is None
