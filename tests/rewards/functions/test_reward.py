import asyncio
import functools
import pickle
import re
from dataclasses import replace

import jsonargparse
import pytest
from reward_functions import CHAT, accuracy, compute_score, run, verl_row
from tiny import completion, prompt

from lit_grpo.rewards import FormatReward, FunctionReward, MathReward, Reward
from lit_grpo.rewards.functions.reward import as_reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import UserError


async def slow_accuracy(completions, answer, scale=1.0, **kwargs):
    await asyncio.sleep(0)
    return [scale * float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def only_completions(completions):
    return [len(text) for text in completions]


def wants_state(prompts, completions, trainer_state):
    return [0.0] * len(completions)


def test_function_in_trls_form_works_unchanged():
    batch = run(FunctionReward(accuracy), prompt(answer="2"), "2", "3")
    assert batch.parts["accuracy"].tolist() == [[1.0, 0.0]]


def test_async_function_works_unchanged():
    batch = run(
        FunctionReward(slow_accuracy, reward_kwargs={"scale": 2}), prompt(answer="2"), "2", "3"
    )
    assert batch.parts["slow_accuracy"].tolist() == [[2.0, 0.0]]


def test_function_gets_texts_ids_and_every_column_as_lists():
    seen = {}

    def look(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [None] * len(completions)

    batch = run(FunctionReward(look), prompt("1+1=", answer="2", level=3, prompt="raw"), "2", "3")
    assert seen == {
        "prompts": ["1+1=", "1+1="],
        "completions": ["2", "3"],
        "completion_ids": [[5, 6], [5, 6]],
        "answer": ["2", "2"],
        "level": [3, 3],
    }
    assert [str(s.outcome) for s in batch.groups[0].scores["look"]] == ["abstain", "abstain"]


def test_a_function_may_change_the_lists_that_it_gets():
    def tick(completions, words, answer):
        lengths = [len(one) + len(golds) for one, golds in zip(words, answer, strict=True)]
        for one in (*words, *answer):
            one.pop()
        return lengths

    row = replace(prompt("p", answer='["2"]', words=["a", "b"]), given_answer=["2"])
    for _ in range(2):
        assert run(FunctionReward(tick), row, "2", "3").rewards.tolist() == [[3.0, 3.0]]


def test_a_function_may_change_the_lists_of_its_settings_and_gets_only_what_it_names():
    class Uncopied(list):
        def __deepcopy__(self, memo):
            raise AssertionError("is copied")

    def pop(completions, words):
        words.pop()
        return [float(len(words)) for _ in completions]

    row = prompt("p", unused=Uncopied())
    reward = FunctionReward(pop, reward_kwargs={"words": ["a", "b", "c"]})
    for _ in range(2):
        assert run(reward, row, "2", "3").rewards.tolist() == [[2.0, 2.0]]


def test_function_without_kwargs_gets_only_what_it_names():
    assert run(FunctionReward(only_completions), CHAT, "2").rewards.tolist() == [[1.0]]


def test_callable_object_with_an_async_call_works():
    class Grader:
        async def __call__(self, completions, **kwargs):
            return [1.0] * len(completions)

    assert run(FunctionReward(Grader(), name="grader"), CHAT, "2").rewards.tolist() == [[1.0]]


def test_wrapped_function_keeps_its_name_and_its_parameters():
    @functools.wraps(slow_accuracy)
    def wrapped(*args, **kwargs):
        return [1.0]

    assert FunctionReward(wrapped, reward_kwargs={"scale": 2}).name == "slow_accuracy"


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        (slow_accuracy, {"scal": 2}, "got 'scal' .* It accepts answer, scale. Did you mean scale?"),
        (accuracy, {"scale": 2}, "named parameters of accuracy, got 'scale'"),
        (only_completions, {"x": 1}, "It accepts none"),
        (accuracy, {"completions": []}, "got 'completions'"),
    ],
)
def test_kwargs_that_the_function_does_not_take_are_refused(function, kwargs, message):
    with pytest.raises(ValueError, match=message):
        FunctionReward(function, reward_kwargs=kwargs)


# verl's form


def with_details(data_source, solution_str, ground_truth, extra_info, format_score=0.1):
    right = solution_str == ground_truth
    score = 1.0 if right else format_score
    return {"score": score, "acc": right, "split": extra_info["split"]}


def forgets_the_score(solution_str, **kwargs):
    return {"acc": True}


async def asks_a_service(data_source, solution_str, ground_truth, extra_info, threshold=0.5):
    await asyncio.sleep(0)
    return {"score": float(len(solution_str) / 10 > threshold)}


def test_function_in_verls_form_works_unchanged():
    batch = run(FunctionReward(compute_score), verl_row(), "72", " 72\n", "7")
    assert batch.parts["compute_score"].tolist() == [[1.0, 1.0, 0.0]]


def test_score_of_a_returned_dict_is_the_value():
    reward = FunctionReward(with_details, reward_kwargs={"format_score": 0.25})
    assert run(reward, verl_row(), "72", "7").rewards.tolist() == [[1.0, 0.25]]


def test_dict_without_a_score_is_an_error_and_not_a_zero():
    batch = run(FunctionReward(forgets_the_score), verl_row(), "72")
    (score,) = batch.groups[0].scores["forgets_the_score"]
    assert (score.value, score.outcome) == (None, "error")
    assert "must have the key 'score', got 'acc'" in score.detail


def test_async_function_in_verls_form_works_unchanged():
    reward = FunctionReward(asks_a_service, reward_kwargs={"threshold": 0.2})
    assert run(reward, verl_row(), "123", "1").rewards.tolist() == [[1.0, 0.0]]
    assert reward.is_async


def test_row_without_a_required_argument_of_verls_form_is_refused_before_training():
    reward = FunctionReward(compute_score)
    reward.check([verl_row()])
    with pytest.raises(ValueError, match="data_source is missing from prompt p, which has "):
        reward.check([prompt(answer="72")])
    with pytest.raises(ValueError, match="ground_truth is missing"):
        reward.check([prompt(answer=None, data_source="openai/gsm8k")])
    FunctionReward(compute_score, reward_kwargs={"data_source": "x"}).check([prompt(answer="72")])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"format_scor": 0}, "It accepts data_source, .*, format_score. Did you mean format_score"),
        ({"solution_str": "x"}, "got 'solution_str'"),
    ],
)
def test_kwargs_that_a_function_in_verls_form_does_not_take_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=f"reward_kwargs must be named .*{message}"):
        FunctionReward(with_details, reward_kwargs=kwargs)


# Mistakes


def scores_one(completions, **kwargs):
    return [1.0]


def score_of_a_list(solution_str):
    return [1.0]


class Grader:
    async def __call__(self, completions, **kwargs):
        return 0.5


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (scores_one, r"scores_one \({file}, line {line}\) returned 1 value for 2 completions\. It"),
        (functools.partial(scores_one, limit=3), r"scores_one \({file}, line {line}\) returned 1"),
        (Grader(), r"Grader\.__call__ \(.*\) returned 0\.5 \(float\) for 2 completions"),
        (score_of_a_list, r"score_of_a_list \(.*\): returned \[1\.0\] \(list .*\), not a number"),
    ],
    ids=["list", "partial", "object", "verl"],
)
def test_a_wrong_result_names_the_function_its_line_and_what_to_return(function, shown):
    line = scores_one.__code__.co_firstlineno
    batch = run(FunctionReward(function, name="mine"), prompt(answer="2"), "2", "3")
    (score, _) = batch.groups[0].scores["mine"]
    assert re.match(shown.format(file=r"\S*test_reward\.py", line=line), score.detail)
    assert score.detail == score.bug
    if function is not score_of_a_list:
        assert "one completion at a time, let a function take solution_str" in score.detail


def test_a_parameter_for_one_completion_is_told_its_name():
    def short(completion, answer):
        return float(len(completion) < 3)

    with pytest.raises(UserError, match=r"got short\(completion, answer\).*Name .*solution_str"):
        FunctionReward(short)


# The data


def test_data_without_a_required_column_is_refused_before_training():
    def wants_level(completions, level):
        return [float(one) for one in level]

    with (
        RewardSuite([FunctionReward(wants_level)]) as suite,
        pytest.raises(ValueError, match="level is missing from prompt p, which has answer") as no,
    ):
        suite.check([prompt(answer="2")])
    advice = "one value for all rows: FunctionReward(wants_level, reward_kwargs={'level': ...})."
    assert str(no.value).endswith(advice)


def test_the_advice_for_a_missing_column_can_be_followed(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(data_source, solution_str): return float(data_source == 'x')")
    with pytest.raises(UserError, match="data_source is missing") as refused:
        FunctionReward(f"{file}:score").check([prompt()])
    path, kwargs = f"function: {file}:score", "reward_kwargs: {data_source: VALUE}"
    assert f"{{class_path: FunctionReward, init_args: {{{path}, {kwargs}}}}}" in str(refused.value)
    with_value = FunctionReward(f"{file}:score", {"data_source": "x"})
    with_value.check([prompt()])
    assert with_value.score(prompt(), completion()) == 1.0


@pytest.mark.parametrize("path", ["{file}:Mine", "some_rewards:Mine", "some_rewards.Mine"])
def test_a_class_of_rewards_is_no_function_but_named_as_one_is(path, tmp_path, monkeypatch):
    file = tmp_path / "some_rewards.py"
    file.write_text("from lit_grpo.rewards import Reward\nclass Mine(Reward): ...")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"is a class of rewards\. Give some_rewards\.Mine as the"):
        FunctionReward(path.format(file=file))
    with pytest.raises(UserError, match=r"class of rewards\. Give MathReward\(\) as the reward"):
        FunctionReward(MathReward)


def test_what_only_trls_trainer_passes_is_not_asked_of_the_data():
    with (
        RewardSuite([FunctionReward(wants_state)]) as suite,
        pytest.raises(UserError, match="must not require trainer_state .* a default") as refused,
    ):
        suite.check([prompt(answer="2")])
    assert "Rename the column" not in str(refused.value)

    def may_log(completions, trainer_state=None, log_metric=None):
        return [float(log_metric is None and trainer_state is None) for _ in completions]

    assert run(FunctionReward(may_log), prompt(answer="2"), "1", "2").rewards.tolist() == [[1, 1]]


def test_required_column_may_come_from_the_data_or_from_reward_kwargs():
    reward = FunctionReward(wants_state, reward_kwargs={"trainer_state": None})
    reward.check([prompt()])
    FunctionReward(accuracy).check([prompt(answer="2")])
    with pytest.raises(ValueError, match="answer is missing from prompt p, which has none"):
        FunctionReward(accuracy).check([prompt(answer=None)])


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with a module."""
    (tmp_path / "own_rewards.py").write_text(
        "def short(completions, limit=3, **kwargs):\n"
        "    return [float(len(text) < limit) for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "own_rewards:short",
        "own_rewards.short",
        "own_rewards.py:short",
        "{dir}/own_rewards.py:short",
    ],
)
def test_function_is_found_by_module_or_by_file(project, path):
    reward = FunctionReward(path.format(dir=project), reward_kwargs={"limit": 2})
    assert run(reward, CHAT, "2", "33").parts["short"].tolist() == [[1.0, 1.0]]
    assert run(reward, prompt(), "2", "33").parts["short"].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("path", ["own_rewards:short", "own_rewards.py:short"])
def test_pickled_reward_finds_its_function_again(project, path):
    reward = pickle.loads(pickle.dumps(FunctionReward(path, {"limit": 2}, weight=0.5)))
    assert (reward.name, reward.weight) == ("short", 0.5)
    assert run(reward, prompt(), "2", "33").parts["short"].tolist() == [[1.0, 0.0]]


def test_every_reward_can_be_composed_in_a_config(project):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--rewards", type=list[Reward])
    rewards = [
        {
            "class_path": "lit_grpo.rewards.FunctionReward",
            "init_args": {
                "function": "own_rewards:short",
                "reward_kwargs": {"limit": 9},
                "weight": 0.5,
            },
        },
        {"class_path": "lit_grpo.rewards.MathReward", "init_args": {"on_error": "drop_group"}},
        {
            "class_path": "lit_grpo.rewards.FormatReward",
            "init_args": {"pattern": "a", "mode": "full"},
        },
        {
            "class_path": "lit_grpo.rewards.LengthReward",
            "init_args": {"start_tokens": 1, "end_tokens": 2, "name": "overlong"},
        },
    ]
    made = parser.instantiate_classes(parser.parse_object({"rewards": rewards})).rewards
    assert [one.name for one in made] == ["short", "math", "format", "overlong"]
    assert (made[0].weight, made[0].reward_kwargs, made[1].on_error) == (
        0.5,
        {"limit": 9},
        "drop_group",
    )
    rewards[1]["init_args"] = {"wieght": 2}
    with pytest.raises(jsonargparse.ArgumentError, match="wieght"):
        parser.parse_object({"rewards": rewards})


def test_what_can_be_a_reward_in_python():
    reward = MathReward()
    assert as_reward(reward) is reward
    assert as_reward(compute_score).name == "compute_score"
    with pytest.raises(UserError, match=r"got the class MathReward\. Give MathReward\(\)\."):
        as_reward(MathReward)
    with pytest.raises(UserError, match=r"Give FormatReward\(\.\.\.\)\."):
        as_reward(FormatReward)
    with pytest.raises(UserError, match="must have a name, and a lambda has none"):
        as_reward(lambda completions: [1.0])
    with pytest.raises(UserError, match=r"or a function, got 'MathReward'\. Give an object of"):
        as_reward("MathReward")


@pytest.mark.parametrize("reward", [MathReward(), MathReward, accuracy])
def test_a_reward_with_its_weight_is_told_where_the_weight_goes(reward):
    with pytest.raises(ValueError, match=r"FunctionReward\(my_function, weight=0\.5\)\.$"):
        as_reward((reward, 0.5))
