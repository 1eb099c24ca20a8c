import math
from dataclasses import replace
from itertools import combinations

import pytest
from tiny import completion, prompt

from lit_grpo.rewards import MathReward, Reward
from lit_grpo.rollout import RolloutEngine, Sampling
from lit_grpo.training import Evaluation
from lit_grpo.training.evaluation import pass_at_k
from lit_grpo.training.metrics import Metrics
from lit_grpo.types import UserCodeFailed

PROMPTS = [prompt("1+1=", id="a", answer="2"), prompt("2+2=", id="b", answer="4")]


class ScriptedEngine(RolloutEngine):
    """Completes each prompt with one text if greedy, else with several."""

    greedy = {"a": "2", "b": "5"}
    sampled = {"a": ["2", "3", "2", "2"], "b": ["5", "5", "4", "7"]}

    def load_weights(self, policy, version):
        self.version = version

    def generate(self, prompts, group_size, sampling, *, seed):
        for i, one in enumerate(prompts):
            for j in range(group_size):
                text = self.greedy[one.id] if sampling.is_greedy else self.sampled[one.id][j]
                yield i * group_size + j, completion([1] * len(text), text=text)


def evaluate(evaluation):
    evaluation.suite.start()
    metrics = Metrics()
    evaluation.add_metrics(metrics, ScriptedEngine(), PROMPTS, Sampling(), seed=0)
    evaluation.suite.close()
    return metrics.merged()


@pytest.mark.parametrize(("n", "right", "k"), [(4, 1, 2), (5, 2, 3), (4, 4, 1), (6, 0, 3)])
def test_pass_at_k_is_the_share_of_draws_with_at_least_one_right_sample(n, right, k):
    draws = list(combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_greedy_accuracy_mean_and_pass_at_k_are_separate_metrics():
    values = evaluate(Evaluation(num_samples=4, pass_at=(1, 2, 4)))
    assert values["val/accuracy"] == 0.5
    assert values["val/avg@4"] == pytest.approx((3 / 4 + 1 / 4) / 2)
    assert values["val/pass@1"] == pytest.approx(0.5)
    assert values["val/pass@2"] == pytest.approx((1 + 0.5) / 2)
    assert values["val/pass@4"] == 1.0


def test_without_samples_only_greedy_accuracy_is_measured():
    assert evaluate(Evaluation()) == {
        "val/accuracy": 0.5,
        "val/unscored_fraction": 0.0,
        "val/mean_length": 1.0,
    }


def test_completions_without_a_score_are_excluded_and_counted():
    class DownForB(Reward):
        def score(self, prompt, completion):
            return None if prompt.id == "b" else 1.0

    values = evaluate(Evaluation(accuracy=DownForB(weight=0.5), num_samples=2, pass_at=(1, 2)))
    assert values["val/unscored_fraction"] == values["val/unscored_fraction@2"] == 0.5
    for name in ("accuracy", "avg@2", "pass@1", "pass@2"):
        assert values[f"val/{name}"] == 1.0, name


def test_samples_without_a_score_are_counted_apart_from_greedy_completions():
    def score(completions, answer, **columns):
        pairs = zip(completions, answer, strict=True)
        return [None if text in "37" else float(text == gold) for text, gold in pairs]

    values = evaluate(Evaluation(accuracy=score, num_samples=4))
    assert (values["val/accuracy"], values["val/unscored_fraction"]) == (0.5, 0.0)
    assert (values["val/avg@4"], values["val/unscored_fraction@4"]) == (4 / 6, 2 / 8)


@pytest.mark.parametrize("value", [3.5, -1.0])
def test_a_value_that_is_no_accuracy_is_refused_with_its_row(value):
    def score(completions, answer, **columns):
        return [value if gold == "4" else 1.0 for gold in answer]

    message = f"the accuracy 'score' must give values from 0 to 1, got {value:g} for row b .*Return"
    with pytest.raises(UserCodeFailed, match=message):
        evaluate(Evaluation(accuracy=score))


def test_an_accuracy_may_be_partial_and_rounded():
    def score(completions, answer, **columns):
        return [1 + 2e-7 if gold == "4" else 0.5 for gold in answer]

    assert evaluate(Evaluation(accuracy=score))["val/accuracy"] == pytest.approx(0.75)


def test_several_accuracies_measure_the_prompts_of_their_sources():
    class Never(Reward):
        def score(self, prompt, completion):
            return 0.0

    metrics = Metrics()
    accuracies = [MathReward(only_sources=["sums"]), Never(only_sources=["words"])]
    evaluation = Evaluation(accuracy=accuracies, num_samples=4)
    prompts = [
        replace(one, source=source) for one, source in zip(PROMPTS, ("sums", "words"), strict=True)
    ]
    evaluation.suite.start()
    evaluation.add_metrics(metrics, ScriptedEngine(), prompts, Sampling(), seed=0)
    evaluation.suite.close()
    values = metrics.merged()
    assert (values["val/sums/accuracy"], values["val/words/accuracy"]) == (1.0, 0.0)
    assert values.keys() == set(evaluation.metric_names(prompts))
    assert (values["val/accuracy"], values["val/unscored_fraction"]) == (0.5, 0.0)
    assert values["val/avg@4"] == pytest.approx((3 / 4 + 0) / 2)


def test_sources_that_the_accuracy_leaves_out_are_named():
    prompts = [replace(PROMPTS[0], source=source) for source in ("sums", "words")]
    evaluation = Evaluation(accuracy=MathReward(only_sources=["sums"]))
    said = evaluation.describe_coverage(prompts, ["sums", "words", "code"])
    assert said.startswith("val/accuracy covers sums, and not words, code (no held-out prompts, or")
    assert evaluation.describe_coverage(prompts, ["sums"]) == ""
    assert Evaluation().describe_coverage(prompts, ["sums", "words"]) == ""
    assert Evaluation().describe_coverage(PROMPTS, []) == ""


def test_the_names_of_the_accuracies_are_known_before_an_evaluation():
    evaluation = Evaluation(num_samples=4, pass_at=(1, 2))
    assert evaluate(evaluation).keys() == set(evaluation.metric_names([]))
    assert Evaluation(num_samples=4).accuracy_names == ["val/accuracy", "val/avg@4", "val/pass@4"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": -1}, "num_samples must be >= 0, got -1 .*Set model.evaluation"),
        ({"num_samples": math.nan}, "num_samples must be an integer, got nan"),
        ({"num_samples": 2.5}, "num_samples must be an integer, got 2.5. Set model.evaluation"),
        ({"num_samples": 2, "pass_at": (1.5,)}, r"pass_at must be a list of integers or None, got"),
        (
            {"num_samples": 2, "pass_at": (1, 4)},
            r"pass_at must be from 1 to num_samples = 2, got \[1, 4\] .*Set model.evaluation",
        ),
        ({"num_samples": 2, "pass_at": (0,)}, r"got \[0\]"),
        (
            {"accuracy": MathReward},
            r"^model\.evaluation\.accuracy must be a Reward object .*Give MathReward\(\)\.",
        ),
        (
            {"accuracy": [MathReward(name="a"), MathReward(name="b", only_sources=["sums"])]},
            r"must be rewards with different only_sources, got a for all, b for \['sums'\]",
        ),
        (
            {"accuracy": [MathReward(only_sources=["a"]), MathReward(only_sources=["b"])]},
            r"^model\.evaluation\.accuracy must have unique names, got math more than once .*Set "
            r"name in the init_args of one; in Python, ",
        ),
        ({"accuracy": "math"}, r"^model\.evaluation\.accuracy must be .*, got 'math'"),
        ({"accuracy": lambda completions: [1.0]}, r"^model\.evaluation\.accuracy must have a name"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(**settings)
