import json

import pytest
from judge_server import JudgeServer, first_line_is, judges, writes
from scored_groups import score_group

from lit_grpo.rewards import JudgeReward
from lit_grpo.types import Outcome


@pytest.fixture
def server():
    with JudgeServer(judges("answer", lambda request, one: {"score": int(one.text)})) as one:
        yield one


def test_a_grade_becomes_its_share_of_the_highest(server):
    scores, _ = score_group(JudgeReward(server.judge(), highest=4), "0", "1", "4")
    assert [one.value for one in scores] == [0.0, 0.25, 1.0]
    assert [one.detail for one in scores] == ["by the rule"] * 3


def grades(*scores):
    """Return a judge that gives these grades one after the other."""
    left = iter(scores)
    return lambda request: writes(json.dumps({"explanation": "x", "score": next(left)}))


def test_the_mean_of_the_votes_counts_and_their_agreement_is_reported(server):
    server.behaviour = grades(2, 4, 4, 6)
    judge = server.judge(temperature=1.0, limits={"max_concurrency": 1})
    (one,), observed = score_group(JudgeReward(judge, votes=4), "any")
    assert one.value == 0.4
    assert observed.means["judge/agreement"] == [0.5]


def test_failed_votes_are_ignored(server):
    server.behaviour = grades("8", "99", "4")
    limits = {"max_concurrency": 1, "num_retries": 0}
    judge = server.judge(temperature=1.0, limits=limits)
    (one,), observed = score_group(JudgeReward(judge, votes=3), "any")
    assert one.value == pytest.approx(0.6)
    assert observed.means["judge/agreement"] == [0.5]


def test_a_single_vote_has_no_agreement(server):
    server.behaviour = grades("8", "99", "99")
    limits = {"max_concurrency": 1, "num_retries": 0}
    judge = server.judge(temperature=1.0, limits=limits)
    (one,), observed = score_group(JudgeReward(judge, votes=3), "any")
    assert one.value == 0.8
    assert not observed.means


def test_without_any_vote_there_is_no_value(server):
    server.behaviour = lambda request: writes("hm")
    judge = server.judge(temperature=1.0, limits={"num_retries": 0})
    (one,), observed = score_group(JudgeReward(judge, votes=2), "any")
    assert (one.value, one.outcome) == (None, Outcome.PARSE_ERROR)
    assert not observed.means


@pytest.mark.parametrize(
    ("settings", "answer", "shown"),
    [({}, "2", ["2"]), ({}, None, []), ({"show_reference": False}, "2", [])],
)
def test_the_gold_answer_is_shown_if_there_is_one_and_it_is_wanted(server, settings, answer, shown):
    score_group(JudgeReward(server.judge(), **settings), "1", answer=answer)
    assert [one.text for one in server.requests[-1].of("reference")] == shown


def test_the_judge_sees_the_question_and_every_completion(server):
    score_group(JudgeReward(server.judge(), completions_per_call=3), "1", "2", "3")
    request = server.requests[-1]
    assert [one.text for one in request.of("question")] == ["1+1="]
    assert [one.text for one in request.of("answer")] == ["1", "2", "3"]


@pytest.mark.parametrize("name", ["highest", "completions_per_call"])
def test_a_count_below_one_is_refused(server, name):
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        JudgeReward(server.judge(), **{name: 0})


def test_a_template_file_replaces_the_prompt(server, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% block system %}Mark by <<{{ nonce }}. Best: {{ highest }}.{% endblock %}"
        "{% block user %}{{ question }}{% for item in items %}\n\n<<{{ nonce }} answer "
        "{{ item.id }}\n{{ item.answer }}\n{{ nonce }}>>{% endfor %}{% endblock %}"
    )
    server.behaviour = judges("answer", first_line_is("2"))
    scores, _ = score_group(JudgeReward(server.judge(), template=str(file)), "2", "3")
    assert [one.value for one in scores] == [1.0, 0.0]
    assert server.requests[-1].texts[0].endswith("Best: 10.")


def test_a_template_that_does_not_show_the_answers_is_refused(server, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% block system %}{{ nonce }}{% endblock %}{% block user %}{{ question }}{% endblock %}"
    )
    with pytest.raises(ValueError, match="must use 'items'"):
        JudgeReward(server.judge(), template=str(file))
