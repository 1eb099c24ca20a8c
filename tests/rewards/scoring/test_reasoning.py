"""Rewards see the answer or the whole completion; the reasoning is found once for all of them."""

import pytest
from chat_models import qwen_tokenizer
from code_rewards import Longest
from tiny import completion, prompt
from tokenizers import AddedToken

from lit_grpo.rewards import (
    FormatReward,
    FunctionReward,
    JudgedReward,
    LengthReward,
    MathReward,
    ProcessReward,
    Reward,
    RubricAlignmentReward,
    ScorerReward,
)
from lit_grpo.rewards.scoring.reasoning import Reasoning
from lit_grpo.rewards.scoring.suite import RewardSuite

TOKENIZER = qwen_tokenizer()
REASONING = Reasoning("<think>", "</think>", TOKENIZER)
PLAIN, OPEN = prompt("2+2?"), prompt("2+2?<think>\n")


def sampled(text: str):
    return completion(TOKENIZER(text)["input_ids"], text=text)


@pytest.mark.parametrize(
    ("text", "after_plain", "after_open"),
    [
        ("It is 4.", "It is 4.", ""),
        ("", "", ""),
        ("<think>2 + 2</think>\n\nIt is 4.", "It is 4.", "It is 4."),
        ("2 + 2</think>It is 4.", "It is 4.", "It is 4."),
        ("<think>2 + 2", "", ""),
        ("It is 5. <think>Or 4?", "", ""),
        ("a</think>It is 5.<think>No.</think>It is 4.", "It is 4.", "It is 4."),
        ("a</think>It is 5.<think>No.", "", ""),
        ("<think>The tag </think> ends it.</think>It is 4.", "It is 4.", "It is 4."),
        ("<think>a</think>", "", ""),
    ],
)
def test_the_answer_is_what_follows_the_last_thought(text, after_plain, after_open):
    for asked, answer in ((PLAIN, after_plain), (OPEN, after_open)):
        found = REASONING.answer(asked, sampled(text))
        assert found.text == answer
        assert found.token_ids == tuple(TOKENIZER(answer)["input_ids"])
        assert found.finish_reason == "stop"


def test_a_completion_without_reasoning_is_the_answer_as_it_is():
    whole = sampled(" 4 ")
    assert REASONING.answer(PLAIN, whole) is whole


def test_a_prompt_that_only_mentions_the_tag_or_closes_it_opens_no_thought():
    for text in ("Write <think> first.", "a<think>\n\n</think>\n\n"):
        assert REASONING.answer(prompt(text), sampled("4")).text == "4"


def test_other_tags_are_configurable():
    other = Reasoning("<reasoning>", "</reasoning>", TOKENIZER)
    assert other.answer(PLAIN, sampled("<reasoning>a</reasoning>4")).text == "4"
    assert other.answer(PLAIN, sampled("<think>a</think>4")).text == "<think>a</think>4"


def test_a_target_does_not_repeat_the_tag_that_the_prompt_has():
    for text in ("<think>\na</think>4", "a</think>4"):
        assert REASONING.continuation(OPEN, text) == "a</think>4"
    assert REASONING.continuation(OPEN, "<think>a</think>4") == "a</think>4"
    assert REASONING.continuation(PLAIN, "<think>a</think>4") == "<think>a</think>4"


class Text(Reward):
    """Remember what it saw; the value is the number of tokens."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.seen = []

    def score(self, prompt, completion):
        self.seen.append(completion.text)
        return len(completion.token_ids)


class GroupText(Text):
    async def score_group(self, prompt, completions):
        return [Text.score(self, prompt, one) for one in completions]


def score(*rewards, texts, prompt=PLAIN):
    suite = RewardSuite(rewards)
    suite.start(REASONING)
    try:
        return suite.score([prompt], [[sampled(text) for text in texts]])
    finally:
        suite.close()


@pytest.mark.parametrize("kind", [Text, GroupText])
def test_each_reward_sees_what_it_chose_and_the_batch_keeps_the_whole(kind):
    strip, keep = kind(reasoning="strip"), kind(name="whole", reasoning="keep")
    texts = ["<think>a</think>It is 4.", "4"]
    batch = score(strip, keep, texts=texts)
    assert (strip.seen, keep.seen) == (["It is 4.", "4"], texts)
    assert [one.text for one in batch.completions] == texts
    assert batch.parts[strip.name].tolist() == [[8, 1]]
    whole = [[len(TOKENIZER(text)["input_ids"]) for text in texts]]
    assert batch.parts["whole"].tolist() == whole


def test_without_tags_of_the_policy_every_reward_sees_the_whole():
    reward = Text(reasoning="strip")
    with RewardSuite([reward]) as suite:
        suite.score([PLAIN], [[sampled("<think>a</think>4")]])
    assert reward.seen == ["<think>a</think>4"]


def test_math_is_read_from_the_answer_alone():
    texts = ["<think>It is 2.</think>No idea.", "<think>3?</think>It is 2.", "<think>It is 2."]
    assert score(MathReward(), texts=texts).rewards.tolist() == [[0, 1, 0]]
    (whole,) = score(MathReward(reasoning="keep"), texts=texts[1:]).rewards.tolist()
    assert whole == [1, 1]
    in_thought = score(MathReward(), texts=["It is 2.", "3?</think>It is 2."], prompt=OPEN)
    assert in_thought.rewards.tolist() == [[0, 1]]


def test_a_format_is_that_of_the_whole_completion():
    thinks = FormatReward("(?s)<think>.*</think>.*")
    assert score(thinks, texts=["<think>a</think>4", "4"]).rewards.tolist() == [[1, 0]]


def test_the_length_is_that_of_the_whole_or_of_the_answer():
    ramp = {"start_tokens": 0, "end_tokens": 100, "end_value": 100.0}
    lengths = [LengthReward(**ramp), LengthReward(**ramp, name="answer", reasoning="strip")]
    batch = score(*lengths, texts=["<think>abc</think>4"])
    assert batch.parts["length"].tolist() == [[6]]  # each tag is one token
    assert batch.parts["answer"].tolist() == [[1]]


def test_each_kind_of_reward_has_a_default():
    assert {kind.reasoning for kind in (JudgedReward, MathReward, ScorerReward)} == {"strip"}
    assert RubricAlignmentReward.reasoning == "strip"
    kept = (Reward, FormatReward, FunctionReward, LengthReward)
    assert {kind.reasoning for kind in kept} == {"keep"}


def test_a_reward_in_a_process_sees_what_it_chose_itself_unless_set_outside():
    inner = Longest(reasoning="strip")
    assert ProcessReward(inner).reasoning == "strip"
    assert ProcessReward(inner, reasoning="keep").reasoning == "keep"
    assert ProcessReward(Longest()).reasoning == "keep"


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="reasoning must be one of strip, keep, got 'drop'"):
        RewardSuite([LengthReward(1, 2, reasoning="drop")])


def test_tags_that_the_tokenizer_hides_are_refused_where_a_reward_needs_them():
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens([AddedToken("[THINK]", special=True)])
    hidden = Reasoning("[THINK]", "[/THINK]", tokenizer)
    with pytest.raises(ValueError, match=r"reasoning_tags must be text, but '\[THINK\]'"):
        RewardSuite([MathReward()]).start(hidden)
    suite = RewardSuite([Text()])
    suite.start(hidden)
    suite.close()
